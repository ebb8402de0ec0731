import torch
from accelerate import Accelerator
from torch import nn

import tensortap as tap

torch.manual_seed(3)
accelerator = Accelerator(cpu=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.body(x)).squeeze(1)


model = Model()
optimizer = torch.optim.Adam(model.body.parameters(), lr=3e-3)
model, optimizer = accelerator.prepare(model, optimizer)
x = torch.randn(400, 10)
y = x[:, 0] * 2 + x[:, 1]
with tap.track(model, optimizer=optimizer, alerts=True, to="runs") as tracker:
    for _ in range(40):
        i = torch.randint(0, 400, (40,))
        loss = nn.functional.mse_loss(model(x[i]), y[i])
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        tracker.step(loss=loss.item())
print(f"final loss {loss.item():.4f}")
