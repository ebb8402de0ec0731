import torch
from torch import nn

torch.manual_seed(23)
x = torch.randn(640, 5)
y = 3 * x[:, 0] - 2 * x[:, 1] + 0.1 * torch.randn(640)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    order = torch.randperm(640)
    for i in range(0, 640, 64):
        b = order[i : i + 64]
        pred = model(x[b])
        loss = ((pred - y[b]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        rmse = (model(x).squeeze(1) - y).pow(2).mean().sqrt().item()
    print(f"epoch {epoch} loss {loss.item():.4f} rmse {rmse:.4f}")
