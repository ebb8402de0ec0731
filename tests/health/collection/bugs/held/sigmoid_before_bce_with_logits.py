import torch
from torch import nn

torch.manual_seed(21)
x = torch.randn(512, 2)
y = ((x**2).sum(1) < 1.2).float().unsqueeze(1)
net = nn.Sequential(
    nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1), nn.Sigmoid()
)
bce = nn.BCEWithLogitsLoss()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(60):
    sel = torch.randint(0, 512, (64,))
    loss = bce(net(x[sel]), y[sel])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(f"step {step}: bce {loss.item():.4f}")
print(f"final {bce(net(x), y).item():.4f}")
