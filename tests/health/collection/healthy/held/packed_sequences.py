import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

torch.manual_seed(20)
seqs = [torch.randint(1, 15, (int(n),)) for n in torch.randint(3, 20, (300,))]
labels = torch.tensor([int(s[0] > 7) for s in seqs])
lengths = torch.tensor([len(s) for s in seqs])
tokens = pad_sequence(seqs, batch_first=True)
emb, lstm, fc = (
    nn.Embedding(15, 16, padding_idx=0),
    nn.LSTM(16, 32, batch_first=True),
    nn.Linear(32, 2),
)
model = nn.ModuleList([emb, lstm, fc])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    for i in range(0, 300, 30):
        packed = pack_padded_sequence(
            emb(tokens[i : i + 30]), lengths[i : i + 30], batch_first=True, enforce_sorted=False
        )
        _, (h, _) = lstm(packed)
        loss = nn.functional.cross_entropy(fc(h[-1]), labels[i : i + 30])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
