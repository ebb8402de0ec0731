import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Text(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 24)
        layer = nn.TransformerEncoderLayer(
            24, 2, 48, dropout=0.1, batch_first=True, norm_first=True
        )
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(24, 2)

    def forward(self, ids):
        return self.out(self.enc(self.emb(ids)).mean(1))

    def training_step(self, batch, batch_idx):
        ids, y = batch
        loss = nn.functional.cross_entropy(self(ids), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        ids, y = batch
        self.log("accuracy", (self(ids).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


L.seed_everything(208)
ids = torch.randint(0, 30, (640, 10))
y = (ids > 20).sum(1).gt(3).long()
train = DataLoader(TensorDataset(ids[:512], y[:512]), batch_size=32, shuffle=True)
valid = DataLoader(TensorDataset(ids[512:], y[512:]), batch_size=64)
trainer = L.Trainer(
    max_steps=60,
    gradient_clip_val=1.0,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Text(), train, valid)
print(f"loss {trainer.callback_metrics['loss'].item():.4f}")
