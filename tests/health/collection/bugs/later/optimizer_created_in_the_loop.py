import torch
from torch import nn

torch.manual_seed(109)
model = nn.Sequential(
    nn.Conv1d(1, 16, 5),
    nn.ReLU(),
    nn.Conv1d(16, 16, 5),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 24, 3),
)
t = torch.linspace(0, 6.28, 32)
labels = torch.randint(0, 3, (512,))
waves = torch.sin(t * (labels[:, None] + 1) + 6.28 * torch.rand(512, 1)) + 0.3 * torch.randn(
    512, 32
)


def train_step(x, y):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    loss = nn.functional.cross_entropy(model(x.unsqueeze(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for epoch in range(3):
    losses = [train_step(waves[i : i + 32], labels[i : i + 32]) for i in range(0, 512, 32)]
    print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")
