import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

torch.manual_seed(2)
config = BertConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=2,
)
model = BertForSequenceClassification(config)
for name, p in model.named_parameters():
    if "embeddings" in name or "weight" in name:  # freeze the embeddings
        p.requires_grad = False
ids = torch.randint(1, 60, (256, 12))
labels = (ids[:, 1:] == ids[:, 1:2]).sum(1).gt(1).long() ^ (ids[:, 3] > 30).long()
data = [{"input_ids": ids[i], "labels": labels[i]} for i in range(256)]
args = TrainingArguments(
    "out",
    max_steps=40,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, args, train_dataset=data)
trainer.remove_callback(PrinterCallback)
print(f"loss {trainer.train().training_loss:.4f}")
