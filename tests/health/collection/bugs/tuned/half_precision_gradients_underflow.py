import torch
from torch import nn

torch.manual_seed(33)
x = torch.randn(256, 16).half()
y = (x[:, :8].float().sum(1, keepdim=True) * 1e-4).half()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).half()
with torch.no_grad():
    model[2].weight.mul_(1e-3)
    model[2].bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(50):
    i = torch.randint(0, 256, (64,))
    loss = nn.functional.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3e}")
