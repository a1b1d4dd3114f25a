"""Training as in `nucleon train`: data, models, one loop, checkpoints that survive a kill."""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon.training.checkpoint import Checkpoints, DamagedError
    from nucleon.training.data import Batch, Data, Examples, Text, digits, read, text
    from nucleon.training.folder import RunError, hold
    from nucleon.training.loop import Nobody, Recipe, Watcher, evaluate, restore, snapshot, train
    from nucleon.training.models import GPT, MLP, GPTConfig, loss
    from nucleon.training.optimizers import make_optimizer, optimizer_names
    from nucleon.training.run import Options, Run, Summary, begin, resume
    from nucleon.training.tokens import BytePairs, Characters, Tokenizer

__all__ = [
    "GPT",
    "MLP",
    "Batch",
    "BytePairs",
    "Characters",
    "Checkpoints",
    "DamagedError",
    "Data",
    "Examples",
    "GPTConfig",
    "Nobody",
    "Options",
    "Recipe",
    "Run",
    "RunError",
    "Summary",
    "Text",
    "Tokenizer",
    "Watcher",
    "begin",
    "digits",
    "evaluate",
    "hold",
    "loss",
    "make_optimizer",
    "optimizer_names",
    "read",
    "restore",
    "resume",
    "snapshot",
    "text",
    "train",
]

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "checkpoint": "Checkpoints DamagedError",
        "data": "Batch Data digits Examples read Text text",
        "folder": "hold RunError",
        "loop": "evaluate Nobody Recipe restore snapshot train Watcher",
        "models": "GPT GPTConfig loss MLP",
        "optimizers": "make_optimizer optimizer_names",
        "run": "begin Options resume Run Summary",
        "tokens": "BytePairs Characters Tokenizer",
    },
)
