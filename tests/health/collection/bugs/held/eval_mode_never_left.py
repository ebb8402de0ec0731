import torch
from torch import nn

torch.manual_seed(30)
x = torch.rand(500, 30)
y = (x[:, :10].mean(1) > x[:, 10:20].mean(1)).float()
net = nn.Sequential(
    nn.Linear(30, 100),
    nn.BatchNorm1d(100),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(100, 50),
    nn.BatchNorm1d(50),
    nn.ReLU(),
    nn.Linear(50, 1),
)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
loss_fn = nn.BCEWithLogitsLoss()
net.train()
for epoch in range(6):
    for i in range(0, 400, 50):
        opt.zero_grad()
        loss = loss_fn(net(x[i : i + 50]).squeeze(1), y[i : i + 50])
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        val = loss_fn(net(x[400:]).squeeze(1), y[400:]).item()
    print(f"[{epoch}] train {loss.item():.4f} val {val:.4f}")
