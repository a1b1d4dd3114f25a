"""The two norms of the theory: the operator norm of actions, the nuclear norm of totals."""

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._scaling import exponent, shift


def operator_norm(x: Tensor) -> Tensor:
    """The largest singular value, ‖X‖_op = max σᵢ, of each matrix of a batch (…, m, n).

    Any representable scale is safe; half precision is computed in float32. A matrix without
    entries has norm 0.
    """
    values, e = _singular_values(_checks.matrix("x", x))
    largest = values.amax(dim=-1) if values.shape[-1] else values.sum(dim=-1)
    return shift(largest, e).to(x.dtype)


def nuclear_norm(x: Tensor) -> Tensor:
    """The sum of the singular values, ‖X‖_* = Σ σᵢ = max_{‖Y‖_op ≤ 1} ⟨X, Y⟩, per matrix.

    Any representable scale is safe; half precision is computed in float32. A matrix without
    entries has norm 0.
    """
    values, e = _singular_values(_checks.matrix("x", x))
    return shift(values.sum(dim=-1), e).to(x.dtype)


def _singular_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values (…, min(m, n)) of x·2^-e, and e, (…)."""
    work = x.to(_checks.work_dtype(x.dtype))
    e = exponent(work)
    return torch.linalg.svdvals(shift(work, -e)), e[..., 0, 0]
