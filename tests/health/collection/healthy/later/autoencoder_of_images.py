import torch
from torch import nn

torch.manual_seed(202)
basis = torch.rand(4, 1, 12, 12)
images = (torch.rand(600, 4) @ basis.flatten(1) / 4).view(600, 1, 12, 12)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(288, 6),
    nn.Linear(6, 288),
    nn.ReLU(),
    nn.Unflatten(1, (8, 6, 6)),
    nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
    nn.Sigmoid(),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(4):
    for batch in images[torch.randperm(600)].split(30):
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.5f}")
