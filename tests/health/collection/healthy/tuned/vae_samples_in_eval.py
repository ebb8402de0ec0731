import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar = nn.Linear(30, 48), nn.Linear(48, 4), nn.Linear(48, 4)
        self.dec = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 30))

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


torch.manual_seed(0)
x = torch.sigmoid(torch.randn(600, 4) @ torch.randn(4, 30))
model = VAE()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(4):
    model.train()
    for i in range(0, 500, 50):
        recon, mu, logvar = model(x[i : i + 50])
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = F.mse_loss(recon, x[i : i + 50], reduction="none").sum(1).mean() + 0.1 * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        val = F.mse_loss(model(x[500:])[0], x[500:]).item()
    print(f"epoch {epoch}: train {loss.item():.4f} val mse {val:.4f}")
