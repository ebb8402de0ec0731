import torch
from torch import nn


def block(cin, cout):
    return nn.Sequential(
        nn.Conv1d(cin, cout, 3, padding=1, bias=False),
        nn.BatchNorm1d(cout, momentum=0.0),
        nn.ReLU(),
        nn.MaxPool1d(2),
    )


torch.manual_seed(32)
t = torch.linspace(0, 6.28, 64)
freq = torch.randint(1, 4, (300,))
signal = 5 + 4 * torch.sin(freq.view(-1, 1) * t + torch.rand(300, 1)) + torch.randn(300, 64)
x, y = signal.unsqueeze(1), freq - 1
model = nn.Sequential(
    block(1, 16), block(16, 16), block(16, 32), nn.Flatten(), nn.Linear(32 * 8, 3)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(5):
    model.train()
    for xb, yb in zip(x[:240].split(30), y[:240].split(30), strict=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_acc = (model(x[240:]).argmax(1) == y[240:]).float().mean().item()
    print(f"epoch {epoch}: train loss {loss.item():.4f}, val acc {val_acc:.3f}")
