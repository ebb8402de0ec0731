import copy

import torch
from torch import nn

torch.manual_seed(2)
q_net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
target_net = copy.deepcopy(q_net).requires_grad_(False)
optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
state = torch.randn(1000, 4)
action = torch.randint(0, 3, (1000,))
reward = (action == (state[:, 0] > 0).long()).float()
next_state = 0.9 * state + 0.3 * torch.randn(1000, 4)
for step in range(1, 61):
    i = torch.randint(0, 1000, (64,))
    q = q_net(state[i]).gather(1, action[i, None]).squeeze(1)
    with torch.no_grad():
        target = reward[i] + 0.9 * target_net(next_state[i]).max(1).values
    loss = nn.functional.smooth_l1_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(q_net.parameters(), 10.0)
    optimizer.step()
    if step % 10 == 0:
        target_net.load_state_dict(q_net.state_dict())
        print(f"step {step}: loss {loss.item():.4f} q {q.mean().item():.3f}")
