import torch
from torch import nn


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU())
        self.mid = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.out = nn.Conv2d(24, 1, 1)

    def forward(self, x):
        a = self.down(x)
        return self.out(torch.cat([a, self.up(self.mid(a))], 1))


torch.manual_seed(206)
grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
centers = torch.randint(4, 12, (200, 2)).float()
masks = ((grid[None] - centers[:, :, None, None]).norm(dim=1) < 4).float().unsqueeze(1)
images = masks + 0.5 * torch.randn(200, 1, 16, 16)
model = UNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    for idx in torch.randperm(200).split(4):
        logits = model(images[idx])
        bce = nn.functional.binary_cross_entropy_with_logits(logits, masks[idx])
        p = logits.sigmoid()
        dice = 1 - (2 * (p * masks[idx]).sum((1, 2, 3)) + 1) / (
            p.sum((1, 2, 3)) + masks[idx].sum((1, 2, 3)) + 1
        )
        loss = bce + dice.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
