import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.head = nn.Linear(32, 3)

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


x = torch.randn(320, 10)
y = (x @ torch.randn(10, 3)).argmax(1)
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
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, scheduler))
trainer.remove_callback(PrinterCallback)
print(f"training loss {trainer.train().training_loss:.4f}")
