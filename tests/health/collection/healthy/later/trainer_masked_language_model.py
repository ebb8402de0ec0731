import torch
from transformers import BertConfig, BertForMaskedLM, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(207)
config = BertConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
model = BertForMaskedLM(config)
starts = torch.randint(2, 40, (320,))
texts = [(s + torch.arange(20) * 3) % 38 + 2 for s in starts]


def collate(batch):
    ids = torch.stack(batch)
    chosen = torch.rand(ids.shape) < 0.15
    labels = ids.masked_fill(~chosen, -100)
    return {"input_ids": ids.masked_fill(chosen, 1), "labels": labels}


args = TrainingArguments(
    "out",
    max_steps=50,
    per_device_train_batch_size=16,
    learning_rate=2e-3,
    warmup_steps=5,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, args, train_dataset=texts, data_collator=collate)
trainer.remove_callback(PrinterCallback)
trainer.train()
print("trained", trainer.state.global_step, "steps")
