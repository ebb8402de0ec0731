import torch
from torch import nn

torch.manual_seed(25)
x = 25 * torch.randn(500, 10)
y = (x[:, 0] > 0).float()


class Logistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(10, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return torch.sigmoid(self.out(torch.relu(self.hidden(x)))).squeeze(-1)


model = Logistic()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    i = torch.randint(0, 500, (50,))
    p = model(x[i])
    loss = -(y[i] * torch.log(p) + (1 - y[i]) * torch.log(1 - p)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(step, loss.item())
