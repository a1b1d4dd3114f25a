"""Hugging Face Trainer: a factory for its `optimizer_cls_and_kwargs`."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from nucleon.optim.registry import create


def factory(name: str) -> type:
    """What `Trainer(optimizer_cls_and_kwargs=(factory("leon"), {"lr": 4e-3}))` takes.

    The Trainer (transformers 5 and later) instantiates what is not a torch optimizer class and
    calls it with its model, so that the parameters are routed by module. With an earlier one build
    the optimizer yourself and pass `optimizers=(optimizer, None)`. The learning rates are those
    given here; the schedule is the Trainer's.

    Args:
        name: an optimizer of `nucleon.list_optimizers()`.
    """

    class Factory:
        def __call__(self, model: nn.Module, **options: Any) -> Optimizer:
            return create(name, model, **options)

    Factory.__name__ = Factory.__qualname__ = f"{name.capitalize()}Factory"
    return Factory
