import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
x = torch.randn(960, 12)
y = (x[:, 0] > x[:, 1] * x[:, 2]).long()
loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    for step, (xb, yb) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(xb), yb)
        (loss / 4).backward()
        if step % 4 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: {loss.item():.4f}")
