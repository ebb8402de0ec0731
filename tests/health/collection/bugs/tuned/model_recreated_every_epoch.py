import torch
from torch import nn

torch.manual_seed(7)


def build_model():
    return nn.Sequential(
        nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


x = torch.rand(640, 6)
y = (x[:, :3].prod(1) + x[:, 3:].sum(1)).unsqueeze(1)
model = build_model()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(4):
    model = build_model()
    order = torch.randperm(640)
    for i in range(0, 640, 64):
        batch = order[i : i + 64]
        loss = nn.functional.mse_loss(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        print(f"epoch {epoch}: mse {nn.functional.mse_loss(model(x), y).item():.4f}")
