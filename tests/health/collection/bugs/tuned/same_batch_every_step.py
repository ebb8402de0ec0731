import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(45)
x = torch.randn(800, 12)
y = (x[:, 0] * x[:, 1] + x[:, 2]).unsqueeze(1)
loader = DataLoader(TensorDataset(x, y), batch_size=32)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    xb, yb = next(iter(loader))
    loss = nn.functional.mse_loss(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
with torch.no_grad():
    print(f"whole data set {nn.functional.mse_loss(model(x), y).item():.4f}")
