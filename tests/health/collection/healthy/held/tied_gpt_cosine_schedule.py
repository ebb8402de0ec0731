import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(8)


class GPT(nn.Module):
    def __init__(self, vocab=32, dim=32, length=16):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(
            dim, 4, 4 * dim, dropout=0.1, batch_first=True, norm_first=True
        )
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, idx):
        t = idx.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        return self.head(
            self.norm(self.enc(self.tok(idx) + self.pos.weight[:t], mask=mask, is_causal=True))
        )


model = GPT()
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim == 1]
opt = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3
)
sched = torch.optim.lr_scheduler.LambdaLR(
    opt, lambda s: min((s + 1) / 5, 0.5 * (1 + math.cos(math.pi * s / 50)))
)
for step in range(50):
    seq = torch.cumsum(torch.randint(0, 3, (16, 17)), 1) % 32
    loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
