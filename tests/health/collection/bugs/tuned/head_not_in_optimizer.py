import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :4].sum(1) > 0).long() + 2 * (x[:, 4] > 0).long()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


model = Classifier()
optimizer = torch.optim.Adam(model.encoder.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss()
for step in range(50):
    idx = torch.randint(0, len(x), (64,))
    loss = criterion(model(x[idx]), y[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
