import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, dim=16, experts=6):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim)) for _ in range(experts)
        )

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, index = probs.topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, slot = (index == e).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, weight[row, slot, None] * expert(x[row]))
        return x + out, (probs.mean(0) ** 2).sum() * len(self.experts)


torch.manual_seed(17)
inp, moe, head = nn.Linear(8, 16), MoE(), nn.Linear(16, 3)
model = nn.ModuleList([inp, moe, head])
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(400, 8)
y = (x @ torch.randn(8, 3)).argmax(1)
for step in range(50):
    i = torch.randint(0, 400, (16,))
    h, balance = moe(inp(x[i]))
    loss = F.cross_entropy(head(h), y[i]) + 0.01 * balance
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
