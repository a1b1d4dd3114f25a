"""Inputs of the bounds: spectra of Gram matrices and checked real arguments."""

from typing import NamedTuple

from torch import Tensor

from nucleon import _checks
from nucleon.certificate import spectrum


class Sides(NamedTuple):
    """The two sides of an inequality left ≤ right (or of an identity), for a test or a table."""

    left: Tensor
    right: Tensor


def root_trace(name: str, gram: Tensor, floor: float = 0.0) -> Tensor:
    """Return Tr √(cI + M) for the Gram matrix M and c = `floor` ≥ 0, shape (…)."""
    return (spectrum(name, gram) + floor).sqrt().sum(-1)


def alike(name: str, value: Tensor, other_name: str, other: Tensor) -> Tensor:
    """Return the matrices `value` in float64, of the same last two dimensions as `other`."""
    tensor = _checks.matrix(name, value)
    if tensor.shape[-2:] != other.shape[-2:]:
        raise ValueError(
            f"{name} must be {tuple(other.shape[-2:])} in its last two dimensions, as "
            f"{other_name} is, got shape {tuple(tensor.shape)}"
        )
    return tensor.double()


def stream(name: str, gradients: Tensor) -> Tensor:
    """Return the stacked gradients (…, T, m, n) in float64."""
    tensor = _checks.matrix(name, gradients)
    if tensor.ndim < 3:
        raise ValueError(
            f"{name} must be stacked as (…, T, m, n), got shape {tuple(tensor.shape)}; "
            f"use torch.stack"
        )
    return tensor.double()
