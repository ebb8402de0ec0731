import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.inp = nn.Linear(10, width)
        self.blocks = [nn.Linear(width, width) for _ in range(depth)]
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = F.relu(self.inp(x))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.out(x).squeeze(-1)


x = torch.randn(1000, 10)
y = torch.sin(x[:, 0] * 2) * x[:, 1] + 0.5 * x[:, 2] ** 2
net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(3):
    total = 0.0
    for i in range(0, 1000, 64):
        loss = F.mse_loss(net(x[i : i + 64]), y[i : i + 64])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / 16:.4f}")
