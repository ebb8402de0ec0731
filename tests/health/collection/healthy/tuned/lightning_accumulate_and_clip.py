import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 32, batch_first=True)
        self.out = nn.Linear(32, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.out(self.rnn(x)[0][:, -1]).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


L.seed_everything(2)
x = torch.randn(480, 9, 4)
y = x[:, :, 0].mean(1)
trainer = L.Trainer(
    max_epochs=3,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Lit(), DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))
print(f"loss {trainer.callback_metrics['loss'].item():.4f}")
