import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x, labels):
        out = self.net(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


torch.manual_seed(2)
x = torch.randn(480, 6)
y = x[:, 0] * x[:, 1] + x[:, 2]
data = [{"x": x[i], "labels": y[i]} for i in range(480)]
args = TrainingArguments(
    "out",
    max_steps=40,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(Regressor(), args, train_dataset=data)
trainer.remove_callback(PrinterCallback)
print(f"training loss {trainer.train().training_loss:.4f}")
