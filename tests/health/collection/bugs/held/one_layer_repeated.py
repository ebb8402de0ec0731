import torch
from torch import nn


class Deep(nn.Module):
    def __init__(self, dim=32, depth=4):
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU())] * depth
        )
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


torch.manual_seed(77)
x = torch.randn(500, 5)
y = torch.sin(3 * x[:, :1]) * x[:, 1:2]
model = Deep()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    i = torch.randint(0, 500, (50,))
    loss = nn.functional.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step}: {loss.item():.4f}")
