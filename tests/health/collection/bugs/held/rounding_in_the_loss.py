import torch
from torch import nn

torch.manual_seed(76)
x = torch.randn(400, 6)
y = (x[:, 0] + 0.5 * x[:, 1] > 0).float()
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid(), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    for i in range(0, 400, 50):
        prediction = torch.round(model(x[i : i + 50]))
        loss = ((prediction - y[i : i + 50]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: error {loss.item():.4f}")
