import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(44)
centers = torch.randn(6, 20)
y = torch.arange(6).repeat_interleave(80)
x = centers[y] + torch.randn(480, 20)
loader = DataLoader(TensorDataset(x, y), batch_size=40)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    running = 0.0
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    with torch.no_grad():
        acc = (model(x).argmax(1) == y).float().mean().item()
    print(f"epoch {epoch}: train loss {running / len(loader):.4f} accuracy {acc:.3f}")
