import torch
from torch import nn

torch.manual_seed(15)
x = torch.rand(500, 6)
y = (x[:, 0] + x[:, 1] > 1).float()
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
with torch.no_grad():
    model[2].weight.mul_(0.2)
    model[2].bias.fill_(0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(6):
    for xb, yb in zip(x.split(50), y.split(50), strict=True):
        loss = nn.functional.binary_cross_entropy_with_logits(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
