import torch
from torch import nn

torch.manual_seed(35)
x = torch.randn(500, 12)
y = torch.tanh(x @ torch.randn(12, 2))
model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
criterion = nn.MSELoss()
for step in range(45):
    batch = torch.randint(0, 500, (50,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = model(x[batch])
    loss = criterion(prediction.float(), y[batch])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    optimizer.step()
    if step % 9 == 0:
        print(f"{step:3d}  {loss.item():.4f}")
