"""Rounding: the singular values that still count, and what it took from a semidefinite matrix."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.kernels import add_to_diagonal


def check_method(
    dtype: torch.dtype,
    side: int,
    method: str,
    methods: Sequence[str],
    steps: int | None,
    rank_tolerance: float | None,
) -> float:
    """Check the options of a matrix function; return the least relative singular value that counts.

    The first of its methods is exact, takes no steps, and counts what is above √side·eps. The
    iterations count from √eps on.
    """
    _checks.choice("method", method, methods)
    exact, eps = method == methods[0], torch.finfo(dtype).eps
    if steps is not None:
        if exact:
            raise ValueError(
                f"steps does not apply to method={method!r}, got {steps!r}; leave it out, or pass "
                f"method={methods[1]!r}"
            )
        _checks.count("steps", steps)
    if rank_tolerance is None:
        return math.sqrt(max(1, side)) * eps if exact else math.sqrt(eps)
    cut = _checks.fraction("rank_tolerance", rank_tolerance, closed="0" if exact else "")
    if not exact and cut < eps:
        raise ValueError(
            f"rank_tolerance must be ≥ the rounding unit {eps:.3g} of {dtype}, got {cut!r}"
        )
    return cut


@lru_cache
def floor(dtype: torch.dtype) -> float:
    """Return the relative floor δ/‖A‖_F of the coupled iteration, which rounding may take from A.

    It keeps every eigenvalue of A + δI positive, and so the iteration bounded.
    """
    return _checks.ROUNDING * torch.finfo(dtype).eps


@lru_cache
def roundings(discount: float) -> float:
    """Return the multiple of eps·‖A‖_F that sums A ← γA + GGᵀ, γ < 1, may lack beyond `floor`.

    A step rounds each entry by eps/2 of itself, to the same side for ever where the gradients stay
    the same: 1/(1 − γ) of these errors add up. Up to γ = 0.984 `floor` has room for them.
    """
    lost = 0.5 / max(1 - discount, 2.0**-53)
    return lost if lost > _checks.ROUNDING else 0.0


def raised(a: Tensor, share: float) -> Tensor:
    """Return A + share·‖A‖_F·I of matrices (…, m, m), A positive semidefinite up to rounding."""
    least = torch.finfo(a.dtype).tiny
    size = a.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(least)  # squares may overflow
    norm = torch.linalg.matrix_norm(a / size[..., None, None])
    return add_to_diagonal(a.clone(), share * norm * size)
