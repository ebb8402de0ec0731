import torch
from torch import nn
from torch.distributions import Categorical


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh())
        self.pi = nn.Linear(64, 3)
        self.v = nn.Linear(64, 1)

    def forward(self, s):
        h = self.body(s)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


torch.manual_seed(203)
agent = ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
for iteration in range(8):
    states = torch.randn(256, 6)
    with torch.no_grad():
        dist, values = agent(states)
        actions = dist.sample()
        old = dist.log_prob(actions)
        rewards = (actions == states[:, :3].argmax(1)).float()
        advantages = rewards - values
    for epoch in range(4):
        for idx in torch.randperm(256).split(64):
            dist, v = agent(states[idx])
            ratio = (dist.log_prob(actions[idx]) - old[idx]).exp()
            adv = advantages[idx]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            policy_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            value_loss = 0.5 * (v - rewards[idx]).pow(2).mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"iteration {iteration}: reward {rewards.mean():.3f}")
