import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
config = {"lr": 1e-9, "batch_size": 40, "epochs": 4}

features = torch.randn(400, 12)
targets = (features[:, 0] * features[:, 1] > 0).float()
loader = DataLoader(TensorDataset(features, targets), batch_size=config["batch_size"], shuffle=True)

model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
criterion = nn.BCEWithLogitsLoss()

for epoch in range(config["epochs"]):
    running, correct = 0.0, 0
    for xb, yb in loader:
        optimizer.zero_grad()
        out = model(xb).squeeze(1)
        loss = criterion(out, yb)
        loss.backward()
        optimizer.step()
        running += loss.item() * len(xb)
        correct += ((out > 0).float() == yb).sum().item()
    print(f"epoch {epoch + 1}: loss {running / 400:.4f} acc {correct / 400:.3f}")
