import torch
from torch import nn

torch.manual_seed(51)
critic = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
opt = torch.optim.Adam(critic.parameters(), lr=3e-3)
gamma = 0.95

s = torch.randn(64, 3)
for step in range(60):
    s_next = 0.95 * s + 0.2 * torch.randn_like(s)
    reward = -s_next.pow(2).sum(1)
    value = critic(s).squeeze(1)
    target = reward + gamma * critic(s_next).squeeze(1)
    loss = nn.functional.mse_loss(value, target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    s = s_next
    if step % 12 == 0:
        print(f"{step:3d} loss {loss.item():.3f} value {value.mean().item():.3f}")
