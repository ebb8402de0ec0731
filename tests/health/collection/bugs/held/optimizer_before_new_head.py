import torch
from torch import nn


class SmallCNN(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(16 * 3 * 3, num_classes)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc(x.flatten(1))


torch.manual_seed(6)
model = SmallCNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
model.fc = nn.Linear(16 * 3 * 3, 3)  # our data set has 3 classes

y = torch.randint(0, 3, (300,))
x = torch.randn(300, 1, 12, 12) + y.view(-1, 1, 1, 1) * 0.4
for epoch in range(5):
    for i in range(0, 300, 30):
        logits = model(x[i : i + 30])
        loss = nn.functional.cross_entropy(logits, y[i : i + 30])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
