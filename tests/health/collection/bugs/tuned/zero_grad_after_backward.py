import torch
from torch import nn

torch.manual_seed(9)
vocab, dim = 50, 24
embed = nn.EmbeddingBag(vocab, dim)
classifier = nn.Linear(dim, 2)
model = nn.Sequential(embed, classifier)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
docs = torch.randint(0, vocab, (256, 12))
labels = ((docs < 10).sum(1) > 2).long()

for step in range(48):
    pick = torch.randint(0, 256, (32,))
    logits = model(docs[pick])
    loss = nn.functional.cross_entropy(logits, labels[pick])
    loss.backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    if step % 12 == 0:
        print(step, f"{loss.item():.4f}")
