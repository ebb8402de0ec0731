import torch
from torch import nn


def build():
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


torch.manual_seed(71)
pretrained = nn.DataParallel(build())
torch.save(pretrained.state_dict(), "pretrained.pt")

model = build()
state = torch.load("pretrained.pt")
model.load_state_dict(state, strict=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(400, 16)
with torch.no_grad():
    y = pretrained(x).argmax(1)
for epoch in range(4):
    for i in range(0, 400, 40):
        loss = nn.functional.cross_entropy(model(x[i : i + 40]), y[i : i + 40])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"fine-tuning epoch {epoch}: {loss.item():.4f}")
