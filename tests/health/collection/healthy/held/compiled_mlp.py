import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 4))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
x = torch.randn(480, 12)
y = (x @ torch.randn(12, 4)).argmax(1)
for epoch in range(4):
    for i in range(0, 480, 40):
        loss = nn.functional.cross_entropy(compiled(x[i : i + 40]), y[i : i + 40])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
