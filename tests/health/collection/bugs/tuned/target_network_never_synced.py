import copy

import torch
from torch import nn

torch.manual_seed(50)
q_net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
target_net = copy.deepcopy(q_net)
target_net.requires_grad_(False)
optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
# replay buffer of a random policy in a toy world
state = torch.randn(1000, 4)
action = torch.randint(0, 2, (1000,))
reward = torch.where(action == (state[:, 0] > 0).long(), 1.0, -1.0)
next_state = 0.9 * state + 0.1 * torch.randn(1000, 4)
gamma, sync_every = 0.9, 1000

for step in range(1, 61):
    i = torch.randint(0, 1000, (64,))
    q = q_net(state[i]).gather(1, action[i].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        target = reward[i] + gamma * target_net(next_state[i]).max(1).values
    loss = nn.functional.smooth_l1_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % sync_every == 0:
        target_net.load_state_dict(q_net.state_dict())
    if step % 15 == 0:
        print(f"step {step}: td loss {loss.item():.4f} mean q {q.mean().item():.4f}")
