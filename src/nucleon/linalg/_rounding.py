"""What rounding may have taken from the eigenvalues of a positive semidefinite matrix."""

from functools import lru_cache

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.kernels import add_to_diagonal


@lru_cache
def floor(dtype: torch.dtype) -> float:
    """The relative floor δ/‖A‖_F of the coupled iteration: what rounding may take from A.

    It keeps every eigenvalue of A + δI positive, and so the iteration bounded.
    """
    return _checks.ROUNDING * torch.finfo(dtype).eps


@lru_cache
def roundings(discount: float) -> float:
    """How many times eps·‖A‖_F the sums A ← γA + GGᵀ, γ < 1, may lack beyond `floor`.

    A step rounds each entry by eps/2 of itself, to the same side for ever where the gradients stay
    the same: 1/(1 − γ) of these errors add up. Up to γ = 0.984 `floor` has room for them.
    """
    lost = 0.5 / max(1 - discount, 2.0**-53)
    return lost if lost > _checks.ROUNDING else 0.0


def raised(a: Tensor, share: float) -> Tensor:
    """A + share·‖A‖_F·I of matrices (…, m, m), A positive semidefinite up to rounding."""
    least = torch.finfo(a.dtype).tiny
    size = a.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(least)  # squares may overflow
    norm = torch.linalg.matrix_norm(a / size[..., None, None])
    return add_to_diagonal(a.clone(), share * norm * size)
