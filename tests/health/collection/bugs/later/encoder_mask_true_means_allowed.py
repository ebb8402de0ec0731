import torch
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=40, dim=48, length=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        n = ids.shape[1]
        allowed = torch.tril(torch.ones(n, n, dtype=torch.bool), diagonal=-1)
        return self.head(self.encoder(self.tok(ids) + self.pos[:n], mask=allowed))


torch.manual_seed(101)
stream = torch.randint(0, 40, (4000,))
stream[1::2] = (stream[::2] * 3 + 1) % 40
model = LM()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    start = torch.randint(0, 3900, (16,))
    batch = torch.stack([stream[s : s + 25] for s in start])
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, 40), batch[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: {loss.item():.4f}")
