import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(4)
student = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
x = torch.randn(600, 10)
y = (x @ torch.randn(10, 3)).argmax(1)
for step in range(60):
    i, u = torch.randint(0, 100, (32,)), torch.randint(100, 500, (32,))
    with torch.no_grad():
        soft = teacher(x[u]).softmax(1)
    consistency = F.kl_div(
        student(x[u] + 0.1 * torch.randn(32, 10)).log_softmax(1), soft, reduction="batchmean"
    )
    loss = F.cross_entropy(student(x[i]), y[i]) + 0.5 * consistency
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.mul_(0.95).add_(s, alpha=0.05)
    if step % 15 == 14:
        teacher.eval()
        with torch.no_grad():
            print(
                f"step {step + 1}: teacher accuracy {(teacher(x[500:]).argmax(1) == y[500:]).float().mean():.3f}"
            )
        teacher.train()
