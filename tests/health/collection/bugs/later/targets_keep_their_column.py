import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(102)
features = torch.randn(900, 7)
prices = (features @ torch.randn(7, 1)).tanh() + 0.05 * torch.randn(900, 1)
loader = DataLoader(TensorDataset(features, prices), batch_size=30, shuffle=True)
net = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
criterion = nn.SmoothL1Loss()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        predicted = net(x).squeeze()
        loss = criterion(predicted, y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.4f}")
