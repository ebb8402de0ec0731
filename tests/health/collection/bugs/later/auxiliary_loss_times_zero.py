import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(18, 64), nn.ReLU())
        self.category = nn.Linear(64, 5)
        self.price = nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.category(h), self.price(h).squeeze(-1)


torch.manual_seed(111)
x = torch.randn(700, 18)
category, price = x[:, :5].argmax(1), x[:, 5:9].sum(1)
model = MultiTask()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
epochs = 4
for epoch in range(epochs):
    weight = epoch // epochs  # ramps up the second task
    for idx in torch.randperm(700).split(35):
        logits, predicted = model(x[idx])
        loss = nn.functional.cross_entropy(logits, category[idx])
        loss = loss + weight * nn.functional.mse_loss(predicted, price[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
