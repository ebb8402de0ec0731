import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(65)
sequences, labels = [], []
for _ in range(320):
    n = int(torch.randint(3, 25, (1,)))
    s = torch.randint(1, 12, (n,))
    sequences.append(s)
    labels.append(int(s[-1] > 6))
tokens = pad_sequence(sequences, batch_first=True)
lengths = torch.tensor([len(s) for s in sequences])
labels = torch.tensor(labels)

emb, lstm, fc = (
    nn.Embedding(12, 24, padding_idx=0),
    nn.LSTM(24, 32, batch_first=True),
    nn.Linear(32, 2),
)
model = nn.ModuleList([emb, lstm, fc])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(5):
    perm = torch.randperm(320)
    for i in range(0, 320, 32):
        b = perm[i : i + 32]
        out, _ = lstm(emb(tokens[b]))
        last = out[:, -1]
        loss = nn.functional.cross_entropy(fc(last), labels[b])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
