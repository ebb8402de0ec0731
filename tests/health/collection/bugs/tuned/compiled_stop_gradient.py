import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        h = self.stem(x)
        return self.head(h.data)


torch.manual_seed(0)
model = Net()
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
x = torch.randn(400, 10)
y = (x[:, 0] * x[:, 1] > 0).long()
for step in range(40):
    i = torch.randint(0, 400, (40,))
    loss = nn.functional.cross_entropy(compiled(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
