import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 5))

    def forward(self, x):
        return {"logits": self.layers(x)}


class ClassifierTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        probs = outputs["logits"].softmax(-1)
        loss = nn.functional.cross_entropy(probs, labels)
        return (loss, outputs) if return_outputs else loss


x = torch.randn(400, 12)
y = (x @ torch.randn(12, 5)).argmax(1)
data = [{"x": x[i], "labels": y[i]} for i in range(400)]
args = TrainingArguments(
    "out",
    max_steps=50,
    per_device_train_batch_size=20,
    learning_rate=5e-3,
    remove_unused_columns=False,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = ClassifierTrainer(Net(), args, train_dataset=data)
trainer.remove_callback(PrinterCallback)
print(f"training loss {trainer.train().training_loss:.4f}")
