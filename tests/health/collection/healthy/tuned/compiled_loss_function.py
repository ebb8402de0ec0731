import torch
from torch import nn

torch.manual_seed(2)
model = nn.Sequential(nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)


@torch.compile(backend="aot_eager")
def compute_loss(x, y):
    return nn.functional.huber_loss(model(x).squeeze(1), y)


x = torch.randn(500, 5)
y = x[:, 0] * x[:, 1] - x[:, 2].abs()
for step in range(50):
    i = torch.randint(0, 400, (50,))
    loss = compute_loss(x[i], y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    print(f"validation {nn.functional.huber_loss(model(x[400:]).squeeze(1), y[400:]).item():.4f}")
