import torch
from torch import nn

torch.manual_seed(5)
model = nn.Sequential(
    nn.Linear(20, 64),
    nn.LayerNorm(64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.LayerNorm(64),
    nn.ReLU(),
    nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=10.0)
centers = torch.randn(4, 20) * 1.5
y_all = torch.randint(0, 4, (800,))
x_all = centers[y_all] + torch.randn(800, 20)
loss_fn = nn.CrossEntropyLoss()
for step in range(60):
    idx = torch.randint(0, 800, (64,))
    logits = model(x_all[idx])
    loss = loss_fn(logits, y_all[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        acc = (logits.argmax(1) == y_all[idx]).float().mean().item()
        print(f"step {step:3d} loss {loss.item():.3f} acc {acc:.2f}")
