import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(78)
policy = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
best = torch.randn(5, 4)
for step in range(60):
    state = torch.randn(64, 5)
    dist = Categorical(logits=policy(state))
    action = dist.sample()
    reward = (action == (state @ best).argmax(1)).float()
    advantage = reward - reward.mean()
    loss = (dist.log_prob(action) * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        print(f"step {step}: reward {reward.mean().item():.3f}")
