import torch
from torch import nn

torch.manual_seed(3)
x = torch.randn(400, 8)
y = x @ torch.randn(8, 1) + 0.1 * torch.randn(400, 1)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.9, momentum=0.9)
mse = nn.MSELoss()
for step in range(40):
    sel = torch.randint(0, 400, (50,))
    loss = mse(model(x[sel]), y[sel])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 8 == 0:
        print(step, loss.item())
print("final", mse(model(x), y).item())
