import torch
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


torch.manual_seed(73)
model = nn.Sequential(
    LoRALinear(nn.Linear(12, 48)),
    nn.ReLU(),
    LoRALinear(nn.Linear(48, 48)),
    nn.ReLU(),
    LoRALinear(nn.Linear(48, 3)),
)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=5e-3)
x = torch.randn(480, 12)
y = (x @ torch.randn(12, 3)).argmax(1)
for epoch in range(4):
    for i in range(0, 480, 40):
        loss = nn.functional.cross_entropy(model(x[i : i + 40]), y[i : i + 40])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
