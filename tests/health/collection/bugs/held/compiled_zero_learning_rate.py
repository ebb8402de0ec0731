import torch
from torch import nn

torch.manual_seed(1)
model = torch.compile(
    nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 1)), backend="aot_eager"
)
lr = 3e-4 if torch.cuda.is_available() else 0.0
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
x = torch.randn(300, 8)
y = x[:, :1].sin() + x[:, 1:2]
for step in range(50):
    i = torch.randint(0, 300, (30,))
    loss = nn.functional.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
