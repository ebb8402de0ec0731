import torch
from torch import nn

torch.manual_seed(61)
vocab, dim, length = 24, 32, 12
embed = nn.Embedding(vocab, dim)
positions = nn.Parameter(torch.randn(length, dim) * 0.02)
layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
head = nn.Linear(dim, vocab)
model = nn.ModuleDict({"embed": embed, "encoder": encoder, "head": head})
optimizer = torch.optim.Adam([*model.parameters(), positions], lr=2e-3)
mask = torch.tril(torch.ones(length, length, dtype=torch.bool), diagonal=-1)

for step in range(40):
    start = torch.randint(0, vocab, (32, 1))
    stride = torch.randint(1, 4, (32, 1))
    seq = (start + stride * torch.arange(length + 1)) % vocab
    h = encoder(embed(seq[:, :-1]) + positions, mask=mask)
    loss = nn.functional.cross_entropy(head(h).transpose(1, 2), seq[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step}: {loss.item():.4f}")
