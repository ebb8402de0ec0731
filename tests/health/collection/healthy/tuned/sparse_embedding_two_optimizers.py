import torch
from torch import nn

torch.manual_seed(18)
user, item = nn.Embedding(200, 16, sparse=True), nn.Embedding(300, 16, sparse=True)
scorer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
sparse = torch.optim.SparseAdam([*user.parameters(), *item.parameters()], lr=1e-2)
dense = torch.optim.Adam(scorer.parameters(), lr=3e-3)
taste = torch.randn(200)
for step in range(60):
    u, i = torch.randint(0, 200, (64,)), torch.randint(0, 300, (64,))
    rating = taste[u] + (i % 7).float() / 3
    pred = scorer(torch.cat([user(u), item(i)], 1)).squeeze(1)
    loss = nn.functional.mse_loss(pred, rating)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    if step % 15 == 0:
        print(f"step {step}: {loss.item():.4f}")
