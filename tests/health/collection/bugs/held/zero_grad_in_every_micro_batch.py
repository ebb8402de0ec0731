import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(53)
x = torch.randn(800, 10)
y = torch.sin(x[:, :1]) + x[:, 1:2]
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
accum = 4
for epoch in range(2):
    total = 0.0
    for step, (xb, yb) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb) / accum
        loss.backward()
        total += loss.item() * accum
        if step % accum == 0:
            optimizer.step()
    print(f"epoch {epoch}: {total / len(loader):.4f}")
