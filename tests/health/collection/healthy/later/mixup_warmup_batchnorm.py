import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(204)
y = torch.randint(0, 5, (640,))
x = torch.randn(5, 3, 10, 10)[y] + torch.randn(640, 3, 10, 10)
model = nn.Sequential(
    nn.Conv2d(3, 24, 3, bias=False),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(24 * 16, 5),
)
decay, no_decay = [], []
for name, p in model.named_parameters():
    (no_decay if p.ndim == 1 else decay).append(p)
groups = [{"params": decay, "weight_decay": 5e-4}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
total, warmup = 80, 10
scheduler = LambdaLR(
    optimizer,
    lambda s: (
        s / warmup
        if s < warmup
        else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup)))
    ),
)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
step = 0
for epoch in range(4):
    model.train()
    for idx in torch.randperm(512).split(26):
        mix = torch.distributions.Beta(0.4, 0.4).sample()
        other = idx[torch.randperm(len(idx))]
        out = model(mix * x[idx] + (1 - mix) * x[other])
        loss = mix * loss_fn(out, y[idx]) + (1 - mix) * loss_fn(out, y[other])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[512:]).argmax(1) == y[512:]).float().mean()
    print(f"epoch {epoch}: {loss.item():.4f} accuracy {accuracy:.3f}")
