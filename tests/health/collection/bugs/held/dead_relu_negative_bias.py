import torch
from torch import nn


def init_weights(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        nn.init.constant_(m.bias, -8.0)


torch.manual_seed(13)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
model.apply(init_weights)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(450, 10)
y = torch.bucketize(x[:, 0] + x[:, 1], torch.tensor([-0.6, 0.6]))
for epoch in range(4):
    correct = 0
    for xb, yb in zip(x.split(45), y.split(45), strict=True):
        logits = model(xb)
        loss = nn.functional.cross_entropy(logits, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        correct += (logits.argmax(1) == yb).sum().item()
    print(f"epoch {epoch} loss {loss.item():.4f} accuracy {correct / 450:.3f}")
