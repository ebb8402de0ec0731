import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(2, 16, 5, padding=2),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.Conv1d(16, 16, 5, stride=2),
            nn.SiLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(16, 2),
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


L.seed_everything(3)
y = torch.randint(0, 2, (400,))
x = torch.randn(400, 2, 24) + torch.sin(torch.arange(24) * (1 + y.view(-1, 1, 1)))
trainer = L.Trainer(
    max_epochs=4,
    precision="bf16-mixed",
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Lit(), DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
print(f"loss {trainer.callback_metrics['loss'].item():.3f}")
