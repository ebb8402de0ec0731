import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from tensortap.rooms.integrations.transformers import Track

torch.manual_seed(4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.head = nn.Linear(32, 2)

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


x = torch.randn(320, 8)
y = (x[:, 0] > x[:, 1]).long()
data = [{"x": x[i], "labels": y[i]} for i in range(320)]
model = Model()
optimizer = torch.optim.AdamW(model.body.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
args = TrainingArguments(
    "out",
    max_steps=40,
    per_device_train_batch_size=16,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
with Track(run="runs", alerts=True) as track:
    trainer = Trainer(
        model, args, train_dataset=data, optimizers=(optimizer, scheduler), callbacks=[track]
    )
    trainer.remove_callback(PrinterCallback)
    print(f"training loss {trainer.train().training_loss:.4f}")
