import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(2)
accelerator = Accelerator(cpu=True)
x = torch.randn(600, 20)
y = (x[:, 0] * x[:, 1] > 0).long()
model = nn.Sequential(
    nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train = DataLoader(TensorDataset(x[:480], y[:480]), batch_size=40, shuffle=True)
model, optimizer, train = accelerator.prepare(model, optimizer, train)


def evaluate():
    model.eval()
    with torch.no_grad():
        return (model(x[480:]).argmax(1) == y[480:]).float().mean().item()


print(f"before training: {evaluate():.3f}")
for epoch in range(4):
    for xb, yb in train:
        loss = nn.functional.cross_entropy(model(xb), yb)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(f"after training: {evaluate():.3f}")
