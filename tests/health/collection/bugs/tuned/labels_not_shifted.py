import torch
from torch import nn


class GRULM(nn.Module):
    def __init__(self, vocab=40, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.gru(self.emb(x))[0])


torch.manual_seed(68)
corpus = torch.randint(0, 40, (3000,))
corpus[1::2] = (corpus[::2] * 3 + 1) % 40
model = GRULM()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
length = 20
for step in range(60):
    starts = torch.randint(0, len(corpus) - length - 1, (24,))
    inputs = torch.stack([corpus[s : s + length] for s in starts])
    labels = torch.stack([corpus[s : s + length] for s in starts])
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        print(f"step {step}: perplexity {loss.exp().item():.3f}")
