import torch
from torch import nn

torch.manual_seed(41)
digits = torch.randint(0, 4, (320,))
images = torch.randint(0, 216, (320, 14, 14)).float()
for d in range(4):
    images[digits == d, 3 * d : 3 * d + 3] += 40
model = nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(6):
    for i in range(0, 320, 32):
        xb, yb = images[i : i + 32], digits[i : i + 32]
        loss = loss_fn(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        acc = (model(images).argmax(1) == digits).float().mean().item()
    print(f"epoch {epoch}: loss {loss.item():.4f} accuracy {acc:.3f}")
