import torch
import torch.nn.functional as F
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(12, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 1)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return F.relu(self.fc3(x)).squeeze(1)


torch.manual_seed(105)
x = torch.randn(800, 12)
y = ((x[:, 0] + x[:, 1] * x[:, 2]) > 0).float()
model = Detector()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(4):
    order = torch.randperm(800)
    for idx in order.split(50):
        loss = F.binary_cross_entropy_with_logits(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
