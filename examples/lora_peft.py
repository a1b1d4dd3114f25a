"""LoRA with peft: the pairs A and B go to Leon, each by itself; the frozen weights stay out."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import nucleon

torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=4)
lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
model = get_peft_model(GPT2LMHeadModel(config), lora)
optimizer = nucleon.create("leon", model, lr=0.02)
for row in optimizer.explain():
    if row.route != "frozen":
        print(row.name, row.shape, row.axes, row.optimizer)
ids = (torch.arange(64) % 32).unfold(0, 16, 4)
for step in range(31):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
