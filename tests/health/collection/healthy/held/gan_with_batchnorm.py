import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)
G = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.999))
for step in range(50):
    real = torch.randn(64, 2) * 0.3 + torch.tensor([1.0, -1.0])
    with torch.no_grad():
        fake = G(torch.randn(64, 8))
    d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()
    opt_d.zero_grad()
    d_loss.backward()
    opt_d.step()
    g_loss = F.softplus(-D(G(torch.randn(64, 8)))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    if step % 10 == 0:
        print(f"step {step}: d {d_loss.item():.4f} g {g_loss.item():.4f}")
