import torch
from torch import nn

torch.manual_seed(12)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(300, 8)
y1 = x.sum(1)
y2 = x[:, 0] - x[:, 1]

for step in range(40):
    idx = torch.randint(0, 300, (32,))
    out = model(x[idx])
    losses = [
        nn.functional.mse_loss(out[:, 0], y1[idx]),
        nn.functional.smooth_l1_loss(out[:, 1], y2[idx]),
    ]
    loss = torch.tensor([l.item() for l in losses], requires_grad=True).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} total loss {loss.item():.4f}")
