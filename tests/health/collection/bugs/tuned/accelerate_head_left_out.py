import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.ModuleDict(
    {"backbone": nn.Sequential(nn.Linear(14, 48), nn.ReLU()), "classifier": nn.Linear(48, 3)}
)
optimizer = torch.optim.AdamW(model["backbone"].parameters(), lr=3e-3)
x = torch.randn(480, 14)
y = (x @ torch.randn(14, 3)).argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for xb, yb in loader:
        logits = model["classifier"](model["backbone"](xb))
        loss = nn.functional.cross_entropy(logits, yb)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
