import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.encoder(x)), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.encoder.parameters(), lr=3e-3)


L.seed_everything(0)
x = torch.randn(400, 16)
y = (x @ torch.randn(16, 4)).argmax(1)
model = Lit()
trainer = L.Trainer(
    max_steps=50,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True))
print(f"loss {model.training_step((x, y), 0).item():.4f}")
