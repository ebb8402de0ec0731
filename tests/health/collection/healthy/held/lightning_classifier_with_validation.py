import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3)
        )

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [opt], [torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.5)]


L.seed_everything(0)
x = torch.randn(480, 16)
y = (x @ torch.randn(16, 3)).argmax(1)
train, val = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])
trainer = L.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Lit(), DataLoader(train, batch_size=40, shuffle=True), DataLoader(val, batch_size=40))
print(f"val loss {trainer.callback_metrics['val_loss'].item():.4f}")
