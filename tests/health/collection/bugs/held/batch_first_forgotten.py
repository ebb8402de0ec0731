import torch
from torch import nn


class SetModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp = nn.Linear(4, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(self.layer(self.inp(x)).mean(1)).squeeze(-1)


torch.manual_seed(66)
x = torch.randn(480, 10, 4)
y = x[:, :, 0].max(1).values
model = SetModel()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(4):
    order = torch.randperm(480)
    total = 0.0
    for i in range(0, 480, 32):
        b = order[i : i + 32]
        loss = nn.functional.mse_loss(model(x[b]), y[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: mse {total / 15:.4f}")
