import torch
from torch import nn

torch.manual_seed(43)
features = torch.randn(500, 14)
score = torch.sigmoid(features[:, 0] + features[:, 1])
labels = score.long()  # good or bad
train_x, train_y = features[:400], labels[:400]

model = nn.Sequential(nn.Linear(14, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()
model.train()
for epoch in range(5):
    order = torch.randperm(400)
    for i in range(0, 400, 40):
        b = order[i : i + 40]
        out = model(train_x[b])
        loss = criterion(out, train_y[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
model.eval()
acc = (model(features[400:]).argmax(1) == labels[400:]).float().mean().item()
print(f"test accuracy {acc:.3f}")
