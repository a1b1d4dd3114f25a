"""torchtitan's debug model with Leon for the matrices: a count that goes on, learned in 20 steps.

    torchrun --nproc-per-node 2 examples/trainers/torchtitan_debug.py

With a text and a tokenizer the same is torchtitan's own command line:

    torchrun … -m torchtitan.train --module llama3 --config llama3_8b \
        --override.imports 'nucleon.integrations.torchtitan.leon={"lr": 0.02, "placement": "owner"}'
"""

import tempfile
from dataclasses import dataclass

import torch

if not torch.cuda.is_available():
    import torchtitan_on_cpu
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer


class Counting(BaseDataLoader):
    """Rows of consecutive numbers from random starts; a rank has its share of each batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Nothing to choose."""

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_):
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.shape, self.batch = (dp_world_size * local_batch_size, seq_len + 1), 0

    def __iter__(self):
        while True:
            noise = torch.Generator().manual_seed(self.batch)
            starts = torch.randint(2048, (self.shape[0], 1), generator=noise)
            rows = (starts + torch.arange(self.shape[1]))[self.rows] % 2048
            self.batch += 1
            yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

    def state_dict(self):
        """Where it goes on."""
        return {"batch": self.batch}

    def load_state_dict(self, state_dict):
        """Go on from there."""
        self.batch = state_dict["batch"]


class NoTokenizer(BaseTokenizer):
    """The tokens are there already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = None


def with_leon(config: Trainer.Config, folder: str, steps: int, **options) -> Trainer.Config:
    """A configuration of torchtitan's with these numbers, and Leon with its options."""
    config.dump_folder = folder
    config.dataloader, config.tokenizer = Counting.Config(), NoTokenizer.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 32, 4
    config.override.imports = [("nucleon.integrations.torchtitan.leon", options)]
    return config if torch.cuda.is_available() else torchtitan_on_cpu.on_cpu(config)


if __name__ == "__main__":
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        config = with_leon(llama3_debugmodel(), folder, steps=20, lr=0.02, placement="owner")
        trainer = config.build()
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()
