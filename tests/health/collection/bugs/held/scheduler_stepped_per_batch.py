import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(10)
data = torch.randn(640, 15)
target = (data.pow(2).sum(1) > 15).long()
model = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)  # every 2 epochs

for epoch in range(3):
    perm = torch.randperm(640)
    total = 0.0
    for i in range(0, 640, 32):
        j = perm[i : i + 32]
        loss = nn.functional.cross_entropy(model(data[j]), target[j])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / 20:.4f}")
