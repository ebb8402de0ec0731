import torch
from torch import nn

torch.manual_seed(29)
x = torch.randn(600, 20)
y = (x[:, :5].sum(1) > 0).long()
x_train, y_train, x_val, y_val = x[:400], y[:400], x[400:] + 1.0, y[400:]
model = nn.Sequential(
    nn.Linear(20, 64),
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Dropout(0.5),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Dropout(0.5),
    nn.Linear(64, 2),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def evaluate():
    correct = 0
    with torch.no_grad():
        for xb, yb in zip(x_val.split(50), y_val.split(50), strict=True):
            correct += (model(xb).argmax(1) == yb).sum().item()
    return correct / len(x_val)


model.train()
for epoch in range(5):
    perm = torch.randperm(400)
    for i in range(0, 400, 40):
        b = perm[i : i + 40]
        loss = nn.functional.cross_entropy(model(x_train[b]), y_train[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f} val accuracy {evaluate():.3f}")
