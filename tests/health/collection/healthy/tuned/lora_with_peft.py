import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(6)
config = GPT2Config(
    vocab_size=48, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = get_peft_model(
    GPT2LMHeadModel(config),
    LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True),
)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
model.train()
for step in range(30):
    ids = (torch.randint(0, 48, (16, 1)) + torch.arange(20)) % 48
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: {loss.item():.4f}")
