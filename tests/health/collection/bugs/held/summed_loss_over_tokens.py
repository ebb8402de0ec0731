import torch
from torch import nn

torch.manual_seed(48)
vocab = 30
seq = torch.cumsum(torch.randint(1, 4, (200, 17)), dim=1) % vocab
inputs, targets = seq[:, :-1], seq[:, 1:]
model = nn.Sequential(nn.Embedding(vocab, 48), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, vocab))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
criterion = nn.CrossEntropyLoss(reduction="sum")
for step in range(50):
    i = torch.randint(0, 200, (25,))
    logits = model(inputs[i])
    loss = criterion(logits.reshape(-1, vocab), targets[i].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
