import torch
from accelerate import Accelerator
from torch import nn


class SetClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(32, 2)

    def forward(self, x, pad):
        h = self.layer(self.inp(x), src_key_padding_mask=pad)
        h = h.masked_fill(pad.unsqueeze(-1), 0.0)
        return self.out(h.sum(1) / (~pad).sum(1, keepdim=True))


torch.manual_seed(2)
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = SetClassifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(40):
    x = torch.randn(32, 8, 3)
    pad = torch.arange(8) >= torch.randint(3, 9, (32, 1))
    y = (x[:, :, 0].masked_fill(pad, 0).sum(1) > 0).long()
    loss = nn.functional.cross_entropy(model(x, pad).float(), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.print(f"step {step}: {loss.item():.3f}")
