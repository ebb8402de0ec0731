import copy

import torch
from torch import nn

torch.manual_seed(49)
model = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
ema = copy.deepcopy(model).requires_grad_(False)
decay = round(1 - 1e-3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(600, 8)
y = torch.cos(x[:, :1]) + x[:, 1:2] * x[:, 2:3]

for step in range(60):
    i = torch.randint(0, 500, (50,))
    loss = nn.functional.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters(), strict=True):
            e.mul_(decay).add_(p, alpha=1 - decay)
    if step % 15 == 14:
        ema.eval()
        with torch.no_grad():
            val = nn.functional.mse_loss(ema(x[500:]), y[500:]).item()
        print(f"step {step + 1}: train {loss.item():.4f} ema val {val:.4f}")
