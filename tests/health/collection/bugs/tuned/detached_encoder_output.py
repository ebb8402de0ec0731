import torch
from torch import nn


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 32))
        self.codes = []

    def forward(self, x):
        z = self.encoder(x).detach()
        self.codes = z  # for the plot at the end
        return self.decoder(z)


torch.manual_seed(11)
basis = torch.randn(5, 32)
x = torch.randn(512, 5) @ basis + 0.05 * torch.randn(512, 32)
model = AutoEncoder()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(60):
    batch = x[torch.randint(0, 512, (64,))]
    recon = model(batch)
    loss = nn.functional.mse_loss(recon, batch)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(f"{step} reconstruction {loss.item():.4f}")
print("code std", round(model.codes.std().item(), 4))
