"""One optimizer for a whole model, by name: nucleon's, or one of torch's."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nucleon._naming import is_address, named, unknown
from nucleon.optim.registry import OPTIMIZERS, create

_UNFIT = {"LBFGS", "SparseAdam", "Muon", "Optimizer"}  # a closure; sparse; matrices only; abstract
TORCH: Mapping[str, Callable[..., Optimizer]] = {
    name.lower(): found
    for name, found in sorted(vars(torch.optim).items())
    if inspect.isclass(found) and issubclass(found, Optimizer) and name not in _UNFIT
}
"""torch's optimizers, by their name in lower case: one rule for every parameter."""

USUAL_RATES = {"sgd": 0.1}
"""Of torch's that were given none; a matrix method has that of its `for_model`."""
USUAL_RATE = 3e-3
"""Of AdamW and torch's others."""


def optimizer_names() -> tuple[str, ...]:
    """What `make_optimizer` knows: what is registered with nucleon, then torch's."""
    return (*sorted(OPTIMIZERS), *TORCH)


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float | None = None,
    aux_lr: float | None = None,
    **options: Any,
) -> Optimizer:
    """The optimizer `name` for a model; nucleon's leave what is no hidden matrix to AdamW.

    Args:
        name: one of `optimizer_names()`, or `package.module:Class` or `file.py:Class`, a class with
            `for_model` as nucleon's, or one of all parameters as torch's.
        model: routed as by `nucleon.create`, for those of nucleon.
        lr: learning rate (None: `for_model`'s; `USUAL_RATES` for torch's).
        aux_lr: that of AdamW beside a matrix method (None: `for_model`'s); torch's have one rate.
        options: the optimizer's own.
    """
    if not is_address(name) and name not in optimizer_names():
        raise ValueError("; ".join(unknown("optimizer", name, optimizer_names())))
    if routes(name):
        make = named(name).for_model if is_address(name) else partial(create, name)
        rates = {"lr": lr, "aux_lr": aux_lr}
        said = {rate: value for rate, value in rates.items() if value is not None}
        return make(model, **said, **options)
    if aux_lr is not None:
        raise ValueError(f"{name} has one rate for all parameters, aux_lr is {aux_lr}; drop it")
    make = named(name) if is_address(name) else TORCH[name]
    usual = USUAL_RATES.get(name, USUAL_RATE)
    return make(model.parameters(), lr=usual if lr is None else lr, **options)


def routes(name: str) -> bool:
    """Whether it is a matrix method, with a `for_model` that takes a seed, rather than torch's."""
    return hasattr(named(name), "for_model") if is_address(name) else name not in TORCH
