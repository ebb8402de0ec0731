import math

import torch
import torch.nn.functional as F
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocab=20, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        h = self.emb(tokens)
        t = tokens.shape[1]
        scores = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(h.shape[-1])
        scores = scores.masked_fill(torch.triu(torch.ones(t, t), 1).bool(), float("-inf"))
        weights = F.softmax(scores, dim=-2)
        return self.out(self.norm(h + weights @ self.v(h)))


torch.manual_seed(62)
model = CausalLM()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
data = torch.cumsum(torch.randint(0, 2, (256, 13)) + 1, dim=1) % 20
for step in range(60):
    batch = data[torch.randint(0, 256, (32,))]
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 20), batch[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 12 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
