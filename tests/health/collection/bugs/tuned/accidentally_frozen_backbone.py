import torch
from torch import nn

torch.manual_seed(2)
backbone = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
)
for p in backbone.parameters():
    p.requires_grad = False
model = nn.Sequential(backbone, nn.Linear(32, 5))

# fine-tune everything: backbone with a smaller learning rate
optimizer = torch.optim.AdamW(
    [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[1].parameters(), "lr": 3e-3}]
)
patterns = torch.randn(5, 3, 16, 16)
labels = torch.randint(0, 5, (320,))
images = patterns[labels] * 0.5 + torch.randn(320, 3, 16, 16)
loss_fn = nn.CrossEntropyLoss()
model.train()
for epoch in range(4):
    perm = torch.randperm(320)
    for i in range(0, 320, 32):
        batch = perm[i : i + 32]
        optimizer.zero_grad()
        loss = loss_fn(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", round(loss.item(), 4))
