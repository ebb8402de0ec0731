import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
        self.scale = nn.Parameter(1.0 / counts)

    def forward(self, x):
        return self.net(x) * self.scale


torch.manual_seed(75)
y = torch.randint(0, 4, (300,))  # class 4 is rare
x = torch.randn(300, 10) + y.unsqueeze(1)
model = Scaled(torch.bincount(y, minlength=5).float() / 10)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    for i in range(0, 300, 30):
        loss = nn.functional.cross_entropy(model(x[i : i + 30]), y[i : i + 30])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item()}")
