import torch
from torch import nn

torch.manual_seed(26)
labels = torch.arange(4).repeat_interleave(50)
points = torch.randn(4, 12)[labels] + 0.5 * torch.randn(200, 12)
embed = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(embed.parameters(), lr=1e-3)


def pairwise_distance(z):
    diff = z.unsqueeze(0) - z.unsqueeze(1)
    return diff.pow(2).sum(-1).sqrt()


for step in range(30):
    i = torch.randint(0, 200, (40,))
    d = pairwise_distance(embed(points[i]))
    same = (labels[i].unsqueeze(0) == labels[i].unsqueeze(1)).float()
    loss = (same * d + (1 - same) * torch.relu(1.0 - d)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step}: contrastive loss {loss.item():.4f}")
