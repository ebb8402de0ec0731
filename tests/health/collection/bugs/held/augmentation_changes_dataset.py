import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(46)
        self.y = torch.randint(0, 3, (n,), generator=g)
        self.x = torch.randn(n, 16, generator=g) + self.y.unsqueeze(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        x *= 1.0 + 0.5 * torch.rand(1)
        x += 0.3 * torch.randn(16)
        return x, self.y[i]


torch.manual_seed(46)
loader = DataLoader(Noisy(), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(6):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: loss {total / len(loader):.4f}")
