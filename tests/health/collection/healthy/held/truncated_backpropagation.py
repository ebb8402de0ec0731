import torch
from torch import nn

torch.manual_seed(11)
emb, lstm, head = nn.Embedding(20, 24), nn.LSTM(24, 48, batch_first=True), nn.Linear(48, 20)
model = nn.ModuleList([emb, lstm, head])
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
text = (torch.arange(8 * 801) * 3 + torch.randint(0, 2, (8 * 801,))).view(8, 801) % 20
state = None
for step in range(40):
    chunk = text[:, 20 * step : 20 * step + 21]
    out, state = lstm(emb(chunk[:, :-1]), state)
    state = tuple(s.detach() for s in state)
    loss = nn.functional.cross_entropy(head(out).flatten(0, 1), chunk[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 10 == 0:
        print(f"chunk {step}: {loss.item():.4f}")
