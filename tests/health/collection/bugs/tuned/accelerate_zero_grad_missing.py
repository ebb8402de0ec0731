import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
x = torch.randn(500, 8)
y = x.abs().sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
)
model.train()
for epoch in range(5):
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: mse {loss.item():.4f}")
