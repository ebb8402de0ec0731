import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

torch.manual_seed(3)
accelerator = Accelerator(cpu=True)
teacher = (
    nn.Sequential(nn.Linear(10, 128), nn.ReLU(), nn.Linear(128, 5)).requires_grad_(False).eval()
)
student = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 5))
optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
student, teacher, optimizer = accelerator.prepare(student, teacher, optimizer)
temperature = 2.0
for step in range(50):
    x = torch.randn(64, 10)
    with torch.no_grad():
        soft = F.softmax(teacher(x) / temperature, dim=1)
    loss = (
        F.kl_div(F.log_softmax(student(x) / temperature, dim=1), soft, reduction="batchmean")
        * temperature**2
    )
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    if step % 10 == 0:
        accelerator.print(f"step {step}: {loss.item():.4f}")
