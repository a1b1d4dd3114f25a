"""Hugging Face Trainer, with both arguments for an optimizer: one optimizer, or a factory."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import nucleon
from nucleon.integrations import huggingface

torch.manual_seed(0)
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
data = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(64) % 32).unfold(0, 16, 1)]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(folder, max_steps=20, per_device_train_batch_size=8, use_cpu=True,
                                  report_to=[], save_strategy="no", logging_steps=10,
                                  disable_tqdm=True)  # fmt: skip

    model = LlamaForCausalLM(config)
    optimizer = nucleon.create("leon", model, lr=0.02, aux_lr=3e-3)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))
    print(f"optimizers=: loss {trainer.train().training_loss:.4f}")

    makes = (huggingface.factory("leon"), {"lr": 0.02, "aux_lr": 3e-3, "weight_decay": 0.0})
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data,
                      optimizer_cls_and_kwargs=makes)  # fmt: skip
    print(f"optimizer_cls_and_kwargs=: loss {trainer.train().training_loss:.4f}")
