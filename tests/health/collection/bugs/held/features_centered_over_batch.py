import torch
from torch import nn


class SpeechCommand(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 24, 3, padding=1)
        self.fc = nn.Linear(24, 3)

    def forward(self, x):
        h = torch.relu(self.conv(x)).transpose(1, 2)  # batch, time, channels
        context = h.mean(dim=0, keepdim=True)
        return self.fc((h + context).amax(dim=1))


torch.manual_seed(67)
y = torch.randint(0, 3, (360,))
x = torch.randn(360, 6, 20)
x[torch.arange(360), y * 2, 5] += 4
model = SpeechCommand()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(5):
    for i in range(0, 360, 36):
        loss = nn.functional.cross_entropy(model(x[i : i + 36]), y[i : i + 36])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
