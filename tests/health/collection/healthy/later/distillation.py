import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(205)
x = torch.randn(800, 16)
y = (x @ torch.randn(16, 6)).argmax(1)
teacher = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 6))
student = nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 6))
opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
for idx in torch.randperm(800).split(40):
    loss = F.cross_entropy(teacher(x[idx]), y[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
teacher.eval()
opt = torch.optim.Adam(student.parameters(), lr=3e-3)
T = 3.0
for epoch in range(3):
    for idx in torch.randperm(800).split(40):
        with torch.no_grad():
            soft = F.softmax(teacher(x[idx]) / T, dim=1)
        logits = student(x[idx])
        distill = F.kl_div(F.log_softmax(logits / T, dim=1), soft, reduction="batchmean") * T * T
        loss = 0.7 * distill + 0.3 * F.cross_entropy(logits, y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
