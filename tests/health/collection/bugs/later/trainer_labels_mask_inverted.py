import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(112)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
texts = [torch.randint(1, 64, (int(n),)) for n in torch.randint(10, 28, (256,))]


def collate(batch):
    longest = max(map(len, batch))
    ids = torch.stack([torch.nn.functional.pad(t, (0, longest - len(t))) for t in batch])
    attention = (ids != 0).long()
    labels = ids.masked_fill(attention == 1, -100)
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


args = TrainingArguments(
    "out",
    max_steps=40,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, args, train_dataset=texts, data_collator=collate)
trainer.remove_callback(PrinterCallback)
trainer.train()
print("trained", trainer.state.global_step, "steps")
