import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(63)


class Attention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        b, t, _ = x.shape
        return x.view(b, self.heads, t, self.size)

    def forward(self, x):
        a = F.scaled_dot_product_attention(
            self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x)), is_causal=True
        )
        return self.o(a.transpose(1, 2).reshape(x.shape))


class CharModel(nn.Module):
    def __init__(self, vocab=27):
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.att = Attention()
        self.ff = nn.Sequential(
            nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, vocab)
        )

    def forward(self, x):
        h = self.emb(x)
        return self.ff(h + self.att(h))


text = (torch.arange(2000) * 7 % 27 + torch.randint(0, 2, (2000,))) % 27
model = CharModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(50):
    at = torch.randint(0, 1980, (32, 1)) + torch.arange(17)
    chunk = text[at]
    loss = F.cross_entropy(model(chunk[:, :-1]).transpose(1, 2), chunk[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"final loss {loss.item():.4f}")
