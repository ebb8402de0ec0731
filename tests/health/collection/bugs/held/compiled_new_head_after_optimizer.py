import torch
from torch import nn

torch.manual_seed(2)
model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model[2] = nn.Linear(40, 4)
step_fn = torch.compile(model, backend="aot_eager")
x = torch.randn(400, 12)
y = (x @ torch.randn(12, 4)).argmax(1)
for epoch in range(4):
    for i in range(0, 400, 40):
        loss = nn.functional.cross_entropy(step_fn(x[i : i + 40]), y[i : i + 40])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
