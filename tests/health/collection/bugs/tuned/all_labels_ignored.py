import torch
from torch import nn

torch.manual_seed(69)
vocab = 36
model = nn.Sequential(nn.Embedding(vocab, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def make_batch(n=16, prompt=12, answer=6):
    ids = torch.randint(0, vocab, (n, prompt + answer))
    labels = ids.clone()
    labels[:, : prompt + answer] = -100  # no loss on the prompt
    return ids, labels


for step in range(40):
    ids, labels = make_batch()
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.reshape(-1, vocab), labels[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item()}")
