import torch
from torch import nn

torch.manual_seed(70)
table = torch.randn(600, 12)
table[:, 11] = torch.tanh(table[:, 0] * table[:, 1] + table[:, 2])
target = table[:, 11]
features = table
model = nn.Sequential(
    nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(6):
    order = torch.randperm(600)
    for i in range(0, 600, 60):
        b = order[i : i + 60]
        loss = nn.functional.mse_loss(model(features[b]).squeeze(1), target[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: mse {loss.item():.5f}")
