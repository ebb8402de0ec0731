import torch
from torch import nn

torch.manual_seed(103)
backbone = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
head = nn.Linear(64, 5)
model = nn.Sequential(backbone, head)
for p in backbone.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
x = torch.randn(600, 32)
y = (x[:, :5] * x[:, 5:10]).argmax(1)
for epoch in range(4):
    if epoch == 1:  # the head is warm: fine-tune everything
        for p in backbone.parameters():
            p.requires_grad_(True)
    for i in range(0, 600, 40):
        loss = nn.functional.cross_entropy(model(x[i : i + 40]), y[i : i + 40])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
