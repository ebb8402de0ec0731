import torch
from torch import nn


class Sentiment(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.cls = nn.Linear(dim, 2)

    def forward(self, ids):
        h = self.enc(self.emb(ids))
        return self.cls(h[:, 0])


torch.manual_seed(64)
lengths = torch.randint(3, 16, (320,))
ids = torch.randint(1, 50, (320, 16))
ids[torch.arange(16) >= lengths.unsqueeze(1)] = 0
y = (ids == 7).any(1).long() | (ids[:, 0] > 30).long()
model = Sentiment()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(4):
    for i in range(0, 320, 32):
        loss = nn.functional.cross_entropy(model(ids[i : i + 32]), y[i : i + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
