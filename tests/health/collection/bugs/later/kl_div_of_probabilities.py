import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(110)
teacher = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
student = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10))
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
temperature = 2.0
for step in range(80):
    x = torch.randn(64, 16)
    with torch.no_grad():
        soft = F.softmax(teacher(x) / temperature, dim=1)
    loss = F.kl_div(F.softmax(student(x) / temperature, dim=1), soft, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: {loss.item():.4f}")
