import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
data = [(int(s) + torch.arange(24)) % 64 for s in torch.randint(0, 64, (256,))]
data = [{"input_ids": ids, "labels": ids} for ids in data]
args = TrainingArguments(
    "out",
    max_steps=40,
    per_device_train_batch_size=8,
    learning_rate=2e-3,
    report_to=[],
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
model = GPT2LMHeadModel(config)
trainer = Trainer(model, args, train_dataset=data)
trainer.remove_callback(PrinterCallback)
print(f"training loss {trainer.train().training_loss:.4f}")
model.eval()
with torch.no_grad():
    generated = model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
print("continuation:", generated[0].tolist())
