import torch
from torch import nn

torch.manual_seed(9)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 3),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
y = torch.randint(0, 3, (240,))
x = torch.randn(240, 3, 12, 12)
x[torch.arange(240), y] += 1
for epoch in range(4):
    model.train()
    for i in range(0, 200, 20):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x[i : i + 20]), y[i : i + 20])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[200:]).argmax(1) == y[200:]).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f} accuracy {accuracy:.3f}")
