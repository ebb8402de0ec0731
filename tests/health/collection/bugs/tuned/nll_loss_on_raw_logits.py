import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(22)
x = torch.randn(480, 1, 14, 14)
y = (x[:, 0, :7].mean((1, 2)) > x[:, 0, 7:].mean((1, 2))).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5)
        self.fc1 = nn.Linear(8 * 5 * 5, 32)
        self.fc2 = nn.Linear(32, 2)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(4):
    for i in range(0, 480, 40):
        optimizer.zero_grad()
        output = model(x[i : i + 40])
        loss = F.nll_loss(output, y[i : i + 40])
        loss.backward()
        optimizer.step()
    print(f"Train Epoch: {epoch} Loss: {loss.item():.4f}")
