import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(100, 32)
        self.inp = nn.Linear(2, 32)
        self.net = nn.Sequential(nn.SiLU(), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 2))
        nn.init.zeros_(self.net[3].weight)
        nn.init.zeros_(self.net[3].bias)

    def forward(self, x, t):
        return self.net(self.inp(x) + self.time(t))


torch.manual_seed(13)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 100), 0)
model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(60):
    angle = torch.rand(128) * 6.28
    x0 = torch.stack([angle.cos(), angle.sin()], 1) * 2
    t = torch.randint(0, 100, (128,))
    noise = torch.randn_like(x0)
    a = alphas[t, None]
    loss = nn.functional.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(f"step {step}: {loss.item():.4f}")
