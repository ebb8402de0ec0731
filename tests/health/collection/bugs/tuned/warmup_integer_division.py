import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
warmup = 100
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) // warmup))

x = torch.randn(600, 16)
w = torch.randn(16, 3)
y = (x @ w).argmax(1)
for step in range(60):
    i = torch.randint(0, 600, (32,))
    logits = model(x[i])
    loss = nn.functional.cross_entropy(logits, y[i])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 15 == 14:
        print(f"{step:4d} loss={loss.item():.4f}")
