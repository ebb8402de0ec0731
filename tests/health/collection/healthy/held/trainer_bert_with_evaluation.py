import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(1)
config = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=2,
)
ids = torch.randint(1, 40, (280, 10))
mask = (torch.arange(10) < torch.randint(4, 11, (280, 1))).long()
ids = ids * mask
labels = (ids[:, 0] > 20).long()
data = [{"input_ids": ids[i], "attention_mask": mask[i], "labels": labels[i]} for i in range(280)]
args = TrainingArguments(
    "out",
    num_train_epochs=3,
    per_device_train_batch_size=16,
    learning_rate=2e-3,
    warmup_steps=5,
    eval_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(
    BertForSequenceClassification(config), args, train_dataset=data[:240], eval_dataset=data[240:]
)
trainer.remove_callback(PrinterCallback)
trainer.train()
print(f"eval loss {trainer.evaluate()['eval_loss']:.4f}")
