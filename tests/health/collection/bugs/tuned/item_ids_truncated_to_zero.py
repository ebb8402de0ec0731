import torch
from torch import nn


class Recommender(nn.Module):
    def __init__(self, users=50, items=80, dim=16):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch):
        u = self.user(batch[:, 0].long())
        i = self.item(batch[:, 1].long())
        return self.mlp(torch.cat([u, i], dim=1)).squeeze(1)


torch.manual_seed(42)
users, items = torch.randint(0, 50, (900,)), torch.randint(0, 80, (900,))
taste, quality = torch.randn(50), torch.randn(80)
rating = taste[users] + 2 * quality[items]
table = torch.stack([users.float(), items.float() / 80], dim=1)
model = Recommender()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    for i in range(0, 900, 60):
        loss = nn.functional.mse_loss(model(table[i : i + 60]), rating[i : i + 60])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
