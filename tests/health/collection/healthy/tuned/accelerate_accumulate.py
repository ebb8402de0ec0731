import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
x = torch.randn(800, 10)
y = torch.sin(x[:, 0]) + x[:, 1]
model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
)
for epoch in range(2):
    for xb, yb in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(xb), yb)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
