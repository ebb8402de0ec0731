import torch
from torch import nn

torch.manual_seed(106)
keep = 0.9
model = nn.Sequential(
    nn.Linear(20, 128),
    nn.ReLU(),
    nn.Dropout(keep),
    nn.Linear(128, 64),
    nn.ReLU(),
    nn.Dropout(keep),
    nn.Linear(64, 4),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(1000, 20)
y = x[:, :4].argmax(1)
for epoch in range(3):
    model.train()
    for idx in torch.randperm(1000).split(50):
        loss = nn.functional.cross_entropy(model(x[idx]), y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(f"epoch {epoch}: accuracy {(model(x).argmax(1) == y).float().mean():.3f}")
