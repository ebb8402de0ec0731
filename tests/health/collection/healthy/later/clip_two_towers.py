import torch
import torch.nn.functional as F
from torch import nn


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 32)
        )
        self.text = nn.EmbeddingBag(50, 32)
        self.scale = nn.Parameter(torch.tensor(2.65))

    def forward(self, images, ids):
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(ids), dim=-1)
        return self.scale.exp().clamp(max=100) * a @ b.T


torch.manual_seed(201)
color = torch.randn(512, 3)
images = color[:, :, None, None] + 0.2 * torch.randn(512, 3, 16, 16)
ids = ((color * 8 + 25).long().clamp(0, 49)).repeat(1, 2)
model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
for epoch in range(4):
    for idx in torch.randperm(512).split(32):
        logits = model(images[idx], ids[idx])
        target = torch.arange(len(idx))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
