"""TRL's SFTTrainer, with Leon for the matrices of the model and AdamW for the rest."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from nucleon.integrations import huggingface

torch.manual_seed(0)
words = ["<pad>", "<eos>", "?", *(f"n{i}" for i in range(29))]
inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
inner.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
counts = [" ".join(f"n{(start + i) % 29}" for i in range(16)) for start in range(64)]
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)  # fmt: skip

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(folder, max_steps=40, per_device_train_batch_size=8, use_cpu=True,
                          bf16=False, report_to=[], save_strategy="no", logging_steps=10,
                          disable_tqdm=True)  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(config), arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": counts}),
        optimizer_cls_and_kwargs=(
            huggingface.factory("leon"), {"lr": 0.02, "aux_lr": 3e-3, "weight_decay": 0.01}
        ),
    )  # fmt: skip
    trainer.train()
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history[:-1]}
    for step, loss in losses.items():
        print(f"step {step}: loss {loss:.4f}")
    if not losses[40] < losses[10]:
        raise SystemExit("the loss has not fallen")
