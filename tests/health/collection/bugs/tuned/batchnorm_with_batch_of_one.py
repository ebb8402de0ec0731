import torch
from torch import nn

torch.manual_seed(28)
labels = torch.randint(0, 3, (90,))
images = torch.randn(90, 3, 8, 8) * 0.3 + 3 * labels.view(-1, 1, 1, 1).float()
model = nn.Sequential(
    nn.Conv2d(3, 12, 3, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.Conv2d(12, 12, 3, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(12, 3),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
batch_size = 1  # images of the real data set have different sizes
model.train()
for step in range(60):
    i = torch.randint(0, 90, (batch_size,))
    loss = nn.functional.cross_entropy(model(images[i]), labels[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        model.eval()
        with torch.no_grad():
            logits = model(images)
            val = nn.functional.cross_entropy(logits, labels).item()
        print(
            f"step {step + 1} train {loss.item():.3f} val {val:.3f} acc {(logits.argmax(1) == labels).float().mean():.3f}"
        )
        model.train()
