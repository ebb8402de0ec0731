import torch
from torch import nn

torch.manual_seed(5)
backbone = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
)
backbone.requires_grad_(False).eval()
head = nn.Linear(128, 4)
optimizer = torch.optim.SGD(head.parameters(), lr=0.5, momentum=0.9)
y = torch.randint(0, 4, (320,))
x = torch.randn(320, 1, 12, 12) * 0.3
x[torch.arange(320), 0, y * 3] += 2
for epoch in range(5):
    for i in range(0, 320, 32):
        with torch.no_grad():
            features = backbone(x[i : i + 32])
        loss = nn.functional.cross_entropy(head(features), y[i : i + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
