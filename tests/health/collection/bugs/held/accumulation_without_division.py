import torch
from torch import nn

torch.manual_seed(52)
accumulation_steps = 8
x = torch.randn(1024, 16)
y = (x[:, :2].prod(1) > 0).long()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

optimizer.zero_grad()
for step in range(320):
    i = torch.randint(0, 1024, (16,))
    loss = nn.functional.cross_entropy(model(x[i]), y[i])
    loss.backward()
    if (step + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    if step % 64 == 63:
        print(f"micro step {step + 1}: loss {loss.item():.4f}")
