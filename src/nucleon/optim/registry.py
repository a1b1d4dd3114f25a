"""Optimizers by name, for configuration files and factories; others may add their own."""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon._naming import unknown
from nucleon.optim.leon import Leon, LeonModelOptions
from nucleon.optim.muon import Muon, MuonModelOptions
from nucleon.optim.options import LR
from nucleon.optim.pion import Pion, PionModelOptions

Factory = Callable[..., Optimizer]
"""(model, **options) → optimizer of the whole model."""

_FACTORIES: dict[str, Factory] = {
    "leon": Leon.for_model,
    "muon": Muon.for_model,
    "pion": Pion.for_model,
}


def register(name: str, factory: Factory) -> None:
    """Make `create(name, model, **options)` call `factory(model, **options)`.

    Args:
        name: any case; a name that is taken is refused.
        factory: returns a torch optimizer.
    """
    key = name.lower()
    if key in _FACTORIES:
        raise ValueError(f"an optimizer is already called {key!r}; register it under another name")
    if not callable(factory):
        raise TypeError(f"factory must be callable, got {type(factory).__name__}")
    _FACTORIES[key] = factory


class _AnyOptions(PionModelOptions, total=False):
    """Of an optimizer whose name is not known before it runs: Pion has all that Leon and Muon have.

    Another's own go by **dict.
    """

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
    """An optimizer of a whole model by its name: "leon", "muon", "pion", or a registered one.

    Args:
        name: any case, see `list_optimizers`.
        model: routed as by `Leon.for_model`.
        options: of `for_model`, as `lr`, `aux_lr` and `overrides`, and of the method.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"name must be one of {', '.join(list_optimizers())}, got {name!r}")
    if name.lower() not in _FACTORIES:
        raise ValueError("; ".join(unknown("optimizer", name, list_optimizers())))
    return _FACTORIES[name.lower()](model, **options)


def list_optimizers() -> list[str]:
    """The names that `create` knows, in order."""
    return sorted(_FACTORIES)
