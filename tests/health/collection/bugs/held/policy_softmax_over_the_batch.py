import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(24)
states = torch.randn(800, 6)
expert_actions = torch.stack([states[:, 0], states[:, 1] + states[:, 2], -states[:, 3]], 1).argmax(
    1
)

policy = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3), nn.LogSoftmax(dim=0))
optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)

# behavior cloning
for step in range(60):
    i = torch.randint(0, 800, (80,))
    log_probs = policy(states[i])
    loss = F.nll_loss(log_probs, expert_actions[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        agree = (log_probs.argmax(1) == expert_actions[i]).float().mean().item()
        print(f"step {step} loss {loss.item():.3f} agreement {agree:.2f}")
