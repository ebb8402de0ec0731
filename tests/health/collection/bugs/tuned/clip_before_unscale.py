import torch
from torch import nn

torch.manual_seed(34)
model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
centers = torch.randn(5, 24)
y = torch.randint(0, 5, (600,))
x = centers[y] + 0.7 * torch.randn(600, 24)

for step in range(50):
    i = torch.randint(0, 600, (60,))
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x[i])
        loss = nn.functional.cross_entropy(logits, y[i])
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
