import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(12)
encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32))
projector = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
opt = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=1e-3)
data = torch.randn(512, 20)
for step in range(50):
    x = data[torch.randint(0, 512, (48,))]
    a = F.normalize(projector(encoder(x + 0.2 * torch.randn_like(x))), dim=1)
    b = F.normalize(projector(encoder(x + 0.2 * torch.randn_like(x))), dim=1)
    logits = a @ b.T / 0.2
    labels = torch.arange(48)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step}: nt-xent {loss.item():.4f}")
