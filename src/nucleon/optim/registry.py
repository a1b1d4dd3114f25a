"""Optimizers by name, for configuration files and factories."""

from collections.abc import Callable
from typing import Any, Unpack

from torch import Tensor, nn

from nucleon._checks import unknown
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.leon import Leon
from nucleon.optim.muon import Muon
from nucleon.optim.options import LR
from nucleon.optim.pion import Pion, PionModelOptions

OPTIMIZERS: dict[str, Callable[..., MatrixOptimizer]] = {
    "leon": Leon.for_model,
    "muon": Muon.for_model,
    "pion": Pion.for_model,
}
"""{name in lower case: (model, **options) → optimizer of the whole model}; add your own."""


class AnyModelOptions(PionModelOptions, total=False):
    """Keyword arguments of any `for_model`; Pion has nearly all options of Leon and Muon."""

    method: Any  # pyright: ignore[reportIncompatibleVariableOverride]
    coefficients: Any


def create(
    name: str, model: nn.Module, lr: float | Tensor = LR, **options: Unpack[AnyModelOptions]
) -> MatrixOptimizer:
    """Return an optimizer of a whole model by its name.

    Args:
        name: one of `OPTIMIZERS`, in any case.
        model: routed as by `Leon.for_model`.
        lr: learning rate of the matrices (0.02).
        options: options of `for_model`, such as `overrides`, and of the optimizer.
    """
    if name.lower() not in OPTIMIZERS:
        raise ValueError("; ".join(unknown("optimizer", name, sorted(OPTIMIZERS))))
    return OPTIMIZERS[name.lower()](model, lr=lr, **options)
