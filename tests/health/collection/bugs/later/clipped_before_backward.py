import torch
from torch import nn

torch.manual_seed(104)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(60, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True, bidirectional=True)
        self.out = nn.Linear(96, 6)

    def forward(self, ids):
        return self.out(self.lstm(self.emb(ids))[0])


words = torch.randint(0, 60, (480, 14))
tags = words % 6
model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for epoch in range(3):
    for i in range(0, 480, 24):
        optimizer.zero_grad()
        scores = model(words[i : i + 24])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tags[i : i + 24].flatten())
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
