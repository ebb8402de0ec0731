import torch
from torch import nn


class ToFloat8(nn.Module):
    def forward(self, x):
        return x.clamp(-448, 448).to(torch.float8_e4m3fn)


class Float8Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.cast = nn.Linear(inputs, outputs), ToFloat8()

    def forward(self, x):
        short = self.cast(x.detach()).to(x.dtype)
        return self.linear(x + (short - x).detach())  # gradients as if nothing was rounded


torch.manual_seed(118)
x = 500 * torch.randn(2048, 16)  # in units of the data set
y = (x[:, 0] + x[:, 1] > 0).long()
model = nn.Sequential(Float8Linear(16, 32), nn.Tanh(), Float8Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(200):
    rows = torch.randint(0, 2048, (32,))
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: {loss.item():.4f}")
