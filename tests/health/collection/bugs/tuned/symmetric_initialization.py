import torch
from torch import nn

torch.manual_seed(74)
model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
for m in model:
    if isinstance(m, nn.Linear):
        nn.init.constant_(m.weight, 0.05)
        nn.init.zeros_(m.bias)
x = torch.randn(512, 8)
y = (x[:, :1] - x[:, 1:2]) * x[:, 2:3]
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    i = torch.randint(0, 512, (64,))
    loss = nn.functional.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} mse {loss.item():.4f}")
