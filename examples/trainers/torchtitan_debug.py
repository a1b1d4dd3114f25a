"""torchtitan's debug model with Leon for the matrices: a count that goes on, learned in 20 steps.

    torchrun --nproc-per-node 2 examples/trainers/torchtitan_debug.py

With a text and a tokenizer the same is torchtitan's own command line:

    torchrun … -m torchtitan.train --module llama3 --config llama3_8b \
        --parallelism.spmd_backend partial_dtensor \
        --override.imports 'nucleon.integrations.torchtitan.leon={"lr": 0.02, "placement": "owner"}'
"""

import tempfile
from dataclasses import dataclass

import torch

if not torch.cuda.is_available():
    import torchtitan_on_cpu  # noqa: F401
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
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
        """Return the number of the next batch."""
        return {"batch": self.batch}

    def load_state_dict(self, state_dict):
        """Continue with the batch of a saved state."""
        self.batch = state_dict["batch"]


class NoTokenizer(BaseTokenizer):
    """The tokens are there already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config, **_):
        super().__init__()

    encode = decode = get_vocab_size = None


def on_numbers(config: Trainer.Config, folder: str, steps: int) -> Trainer.Config:
    """Change a configuration of torchtitan to learn to count."""
    config.dump_folder, config.debug.seed = folder, 0
    config.dataloader, config.tokenizer = Counting.Config(), NoTokenizer.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 32, 4
    return config if torch.cuda.is_available() else plain(config)


def plain(config: Trainer.Config) -> Trainer.Config:
    """Change a configuration to run on a CPU too: DTensors, torch's attention, no CUDA graphs."""
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.disable_cuda_graphs = True
    for _, _, parent, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return config


def with_leon(config: Trainer.Config, **options) -> Trainer.Config:
    """Add the override of the command line that chooses Leon with these options."""
    config.override.imports = [("nucleon.integrations.torchtitan.leon", options)]
    return config


if __name__ == "__main__":
    init_logger()
    with tempfile.TemporaryDirectory() as folder:
        config = on_numbers(llama3_debugmodel(), folder, steps=20)
        trainer = with_leon(config, lr=0.02, placement="owner").build()
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()
