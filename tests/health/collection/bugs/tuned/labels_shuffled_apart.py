import torch
from torch import nn

torch.manual_seed(40)
centers = 2 * torch.randn(4, 10)
y = torch.randint(0, 4, (640,))
x = centers[y] + torch.randn(640, 10)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(5):
    x = x[torch.randperm(len(x))]
    y = y[torch.randperm(len(y))]
    total, hits = 0.0, 0
    for i in range(0, 640, 64):
        xb, yb = x[i : i + 64], y[i : i + 64]
        logits = model(xb)
        loss = nn.functional.cross_entropy(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        hits += (logits.argmax(1) == yb).sum().item()
    print(f"epoch {epoch}: loss {total / 10:.4f} acc {hits / 640:.3f}")
