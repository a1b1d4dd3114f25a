"""Optimizers by name, for configuration files and factories."""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon._naming import unknown
from nucleon.optim.leon import Leon, LeonModelOptions
from nucleon.optim.muon import Muon, MuonModelOptions
from nucleon.optim.options import LR
from nucleon.optim.pion import Pion, PionModelOptions

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "leon": Leon.for_model,
    "muon": Muon.for_model,
    "pion": Pion.for_model,
}
"""{name in lower case: (model, **options) → optimizer of the whole model}; add your own."""


class _AnyOptions(PionModelOptions, total=False):
    """Options of an optimizer named by a variable; Pion has all options of Leon and Muon."""

    method: Any  # pyright: ignore[reportIncompatibleVariableOverride]


@overload
def create(
    name: Literal["leon", "Leon"],
    model: nn.Module,
    *,
    lr: float | Tensor = LR,
    **options: Unpack[LeonModelOptions],
) -> Leon: ...
@overload
def create(
    name: Literal["muon", "Muon"],
    model: nn.Module,
    *,
    lr: float | Tensor = LR,
    **options: Unpack[MuonModelOptions],
) -> Muon: ...
@overload
def create(
    name: Literal["pion", "Pion"],
    model: nn.Module,
    *,
    lr: float | Tensor = LR,
    **options: Unpack[PionModelOptions],
) -> Pion: ...
@overload
def create(
    name: str, model: nn.Module, *, lr: float | Tensor = LR, **options: Unpack[_AnyOptions]
) -> Optimizer: ...
def create(name: str, model: nn.Module, **options: Any) -> Optimizer:
    """Return an optimizer of a whole model by its name.

    Args:
        name: one of `OPTIMIZERS`, in any case.
        model: routed as by `Leon.for_model`.
        options: options of `for_model`, such as `lr` and `overrides`, and of the optimizer.
    """
    if name.lower() not in OPTIMIZERS:
        raise ValueError("; ".join(unknown("optimizer", name, sorted(OPTIMIZERS))))
    return OPTIMIZERS[name.lower()](model, **options)
