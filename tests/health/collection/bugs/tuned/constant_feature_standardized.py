import torch
from torch import nn

torch.manual_seed(27)
raw = torch.randn(400, 8) * torch.tensor([1.0, 10, 5, 2, 1, 1, 3, 0]) + 4
price = raw[:, 0] * 2 + raw[:, 1] * 0.3
mean, std = raw.mean(0), raw.std(0)
inputs = (raw - mean) / std
targets = (price - price.mean()) / price.std()

model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(5):
    losses = []
    for xb, yb in zip(inputs.split(50), targets.split(50), strict=True):
        loss = nn.functional.l1_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: mae {sum(losses) / len(losses):.4f}")
