import torch
import torch.nn.functional as F
from torch import nn


class TinyGPT(nn.Module):
    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(12, dim))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.emb(ids) + self.pos
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.proj(a.transpose(1, 2).flatten(2)))


torch.manual_seed(1)
model = torch.compile(TinyGPT(), backend="aot_eager")
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(40):
    seq = (torch.randint(0, 24, (24, 1)) + torch.arange(13) * torch.randint(1, 4, (24, 1))) % 24
    loss = F.cross_entropy(model(seq[:, :-1]).flatten(0, 1), seq[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
