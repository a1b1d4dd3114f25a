"""What the bounds are computed from: spectra of Gram matrices and checked real arguments."""

from typing import NamedTuple

import torch
from torch import Tensor

from nucleon import _checks

Real = float | Tensor
"""A number, or one per game as a tensor that broadcasts to the batch."""


class Sides(NamedTuple):
    """The two sides of an inequality left ≤ right (or of an identity), for a test or a table."""

    left: Tensor
    right: Tensor


def spectrum(name: str, gram: Tensor) -> Tensor:
    """The eigenvalues (…, m) of the Gram matrix (…, m, m) in float64, clipped at 0.

    It is checked up to the rounding of its dtype, so it must come in the one it was summed in.
    """
    held = _checks.decomposable(_checks.symmetric(name, gram))
    eigenvalues = torch.linalg.eigvalsh(held.double())
    # A sum of many rounded products drifts from semidefinite by far more than one rounding, so the
    # check only refuses what no accumulation could explain. Subnormals round like the smallest
    # normal number, whatever their size.
    info = torch.finfo(gram.dtype)
    size = eigenvalues[..., -1:].abs().clamp_min(gram.shape[-1] * info.smallest_normal)
    if (eigenvalues[..., :1] < -(info.eps**0.5) * size).any():
        raise ValueError(
            f"{name} must be positive semidefinite, its smallest eigenvalue is "
            f"{eigenvalues.min().item():.3g}; pass a sum of G @ G.mT"
        )
    return eigenvalues.clamp(min=0)


def root_trace(name: str, gram: Tensor, floor: float = 0.0) -> Tensor:
    """Tr √(cI + M) for the Gram matrix M and c = `floor` ≥ 0, shape (…)."""
    return (spectrum(name, gram) + floor).sqrt().sum(-1)


def real(name: str, value: Real, batch: Tensor) -> Tensor:
    """`value` ≥ 0 in float64, a scalar or a tensor that broadcasts to the shape of `batch`."""
    if not isinstance(value, Tensor):
        number = _checks.nonnegative(name, value)
        return torch.as_tensor(number, dtype=torch.float64, device=batch.device)
    _checks.broadcastable(name, value.shape, "the batch", batch.shape)
    if (_checks.finite(name, value) < 0).any():
        raise ValueError(f"{name} must be ≥ 0, its smallest entry is {value.min().item():.3g}")
    return value.to(device=batch.device, dtype=torch.float64)


def alike(name: str, value: Tensor, other_name: str, other: Tensor) -> Tensor:
    """The matrices `value` in float64, of the same last two dimensions as `other`."""
    tensor = _checks.matrix(name, value)
    if tensor.shape[-2:] != other.shape[-2:]:
        raise ValueError(
            f"{name} must be {tuple(other.shape[-2:])} in its last two dimensions, as "
            f"{other_name} is, got shape {tuple(tensor.shape)}"
        )
    return tensor.double()


def stream(name: str, gradients: Tensor) -> Tensor:
    """The stacked gradients (…, T, m, n) in float64."""
    tensor = _checks.matrix(name, gradients)
    if tensor.ndim < 3:
        raise ValueError(
            f"{name} must be stacked as (…, T, m, n), got shape {tuple(tensor.shape)}; "
            f"use torch.stack"
        )
    return tensor.double()
