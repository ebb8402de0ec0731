import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(3)
config = BertConfig(
    vocab_size=30,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=64,
    num_labels=3,
)
model = BertForTokenClassification(config)
model.bert.embeddings.requires_grad_(False)
ids = torch.randint(0, 30, (256, 8))
labels = ids % 3
labels[:, 0] = -100
data = [{"input_ids": ids[i], "labels": labels[i]} for i in range(256)]
args = TrainingArguments(
    "out",
    max_steps=40,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.remove_callback(PrinterCallback)
print(f"training loss {trainer.train().training_loss:.4f}")
