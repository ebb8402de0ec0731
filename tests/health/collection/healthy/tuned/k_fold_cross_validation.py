import torch
from torch import nn

torch.manual_seed(14)
x = torch.randn(300, 8)
y = (x[:, :3].sum(1) > 0).long()
folds = torch.randperm(300).chunk(3)
scores = []
for k in range(3):
    train = torch.cat([folds[j] for j in range(3) if j != k])
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model.train()
    for _ in range(20):
        b = train[torch.randint(0, 200, (40,))]
        loss = nn.functional.cross_entropy(model(x[b]), y[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores.append((model(x[folds[k]]).argmax(1) == y[folds[k]]).float().mean().item())
print("accuracy per fold:", [round(s, 3) for s in scores])
