import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(16)
critic = nn.Sequential(
    spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(32, 1))
)
gen = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
opt_c, opt_g = (
    torch.optim.RMSprop(critic.parameters(), lr=1e-3),
    torch.optim.RMSprop(gen.parameters(), lr=1e-3),
)
for step in range(60):
    real = torch.randn(64, 2) + 2
    fake = gen(torch.randn(64, 4))
    c_loss = critic(fake.detach()).mean() - critic(real).mean()
    opt_c.zero_grad()
    c_loss.backward()
    opt_c.step()
    if step % 3 == 2:
        g_loss = -critic(gen(torch.randn(64, 4))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
    if step % 15 == 14:
        print(f"step {step}: critic {c_loss.item():.4f} generator {g_loss.item():.4f}")
