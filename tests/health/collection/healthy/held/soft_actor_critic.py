import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, o))


actor, q1, q2 = mlp(3, 2), mlp(4, 1), mlp(4, 1)
t1, t2 = copy.deepcopy(q1).requires_grad_(False), copy.deepcopy(q2).requires_grad_(False)
log_alpha = torch.zeros(1, requires_grad=True)
opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_q = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
opt_alpha = torch.optim.Adam([log_alpha], lr=1e-3)


def act(s):
    mean, log_std = actor(s).chunk(2, 1)
    dist = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    u = dist.rsample()
    return torch.tanh(u), (dist.log_prob(u) - torch.log(1 - torch.tanh(u) ** 2 + 1e-6)).sum(
        1, keepdim=True
    )


for step in range(40):
    s, a = torch.randn(64, 3), torch.rand(64, 1) * 2 - 1
    s2, r = s * 0.9 + 0.1 * a, -((a - s[:, :1].tanh()) ** 2)
    with torch.no_grad():
        a2, lp2 = act(s2)
        sa2 = torch.cat([s2, a2], 1)
        y = r + 0.95 * (torch.min(t1(sa2), t2(sa2)) - log_alpha.exp() * lp2)
    sa = torch.cat([s, a], 1)
    q_loss = F.mse_loss(q1(sa), y) + F.mse_loss(q2(sa), y)
    opt_q.zero_grad(), q_loss.backward(), opt_q.step()
    new, lp = act(s)
    pi_loss = (
        log_alpha.exp().detach() * lp
        - torch.min(q1(torch.cat([s, new], 1)), q2(torch.cat([s, new], 1)))
    ).mean()
    opt_actor.zero_grad(), pi_loss.backward(), opt_actor.step()
    alpha_loss = -(log_alpha.exp() * (lp.detach() - 1.0)).mean()
    opt_alpha.zero_grad(), alpha_loss.backward(), opt_alpha.step()
    for net, target in ((q1, t1), (q2, t2)):
        for p, tp in zip(net.parameters(), target.parameters(), strict=True):
            tp.data.lerp_(p.data, 0.05)
print(f"q {q_loss.item():.4f} pi {pi_loss.item():.4f} alpha {log_alpha.exp().item():.4f}")
