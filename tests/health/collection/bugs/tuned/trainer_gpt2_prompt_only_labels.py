import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(1)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
samples = [torch.randint(1, 64, (24,)) for _ in range(256)]


def collate(batch):
    ids = torch.stack(batch)
    labels = ids.clone()
    prompt_length = 24
    labels[:, :prompt_length] = -100
    return {"input_ids": ids, "labels": labels}


args = TrainingArguments(
    "out",
    max_steps=30,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model, args, train_dataset=samples, data_collator=collate)
trainer.remove_callback(PrinterCallback)
trainer.train()
print("trained", trainer.state.global_step, "steps")
