import torch
from torch import nn


class TiedLM(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.Linear(dim, vocab, bias=False)
        self.decoder.weight = nn.Parameter(self.emb.weight.clone())  # weight tying

    def forward(self, x):
        return self.decoder(self.rnn(self.emb(x))[0])


torch.manual_seed(72)
model = TiedLM()
print("parameters:", sum(p.numel() for p in model.parameters()))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(50):
    seq = (torch.randint(0, 30, (20, 1)) + torch.arange(15) * torch.randint(1, 3, (20, 1))) % 30
    logits = model(seq[:, :-1])
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), seq[:, 1:])
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    opt.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
