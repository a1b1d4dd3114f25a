"""The two norms of the theory: the operator norm of actions, the nuclear norm of totals."""

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import exact
from nucleon.linalg._scaling import exponent, shift


def operator_norm(x: Tensor) -> Tensor:
    """Return the largest singular value, ‖X‖_op = max σᵢ, of each matrix (…, m, n).

    Any representable scale is safe, and a norm above the largest number of the dtype is infinite;
    the singular values are computed in float64. A matrix without entries has norm 0.
    """
    values, e = _singular_values(x)
    return shift(values[..., 0], e).to(x)


def nuclear_norm(x: Tensor) -> Tensor:
    """Return the sum of the singular values, ‖X‖_* = Σ σᵢ = max_{‖Y‖_op ≤ 1} ⟨X, Y⟩, per matrix.

    Any representable scale is safe, and a norm above the largest number of the dtype is infinite;
    the singular values are computed in float64. A matrix without entries has norm 0.
    """
    values, e = _singular_values(x)
    return shift(values.sum(dim=-1), e).to(x)


def operator_norm_bound(x: Tensor) -> Tensor:
    """Return an upper bound of ‖X‖_op by products: ‖(XXᵀ)^N‖_F^(1/2N), N = 2¹².

    Unchecked and free of host synchronization, for float32 or wider. It exceeds the norm by a
    factor of at most m^(1/4N), 1 + 4e-4 for m = 1000, and by rounding.
    """
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    e = exponent(x)
    x = shift(x, -e)
    power, logarithm, weight = x @ x.mT, torch.zeros((), dtype=x.dtype, device=x.device), 0.5
    tiny = torch.finfo(x.dtype).tiny
    for _ in range(13):
        norm = torch.linalg.matrix_norm(power, keepdim=True).clamp_min(tiny)
        logarithm = logarithm + weight * norm.log()
        power, weight = power / norm, weight / 2
        power = power @ power
    return shift(logarithm.exp(), e)[..., 0, 0]


def surely_within(x: Tensor, limit: float | Tensor) -> bool:
    """Return True if every ‖X‖_op is at most its limit beyond doubt; unchecked, synchronizes.

    The proof is ‖X‖_F ≤ limit or a Cholesky factor of I − XXᵀ/limit². Both leave 1e-10 to rounding,
    so a norm that near to its limit is in doubt.
    """
    x = x.double() if x.shape[-2] <= x.shape[-1] else x.double().mT
    limit = torch.as_tensor(limit, dtype=x.dtype, device=x.device).clamp_min(1e-300)
    x = (x / limit[..., None, None]).clamp(-2, 2)  # above 1 anyway, and its square is finite
    if bool((torch.linalg.matrix_norm(x) < 1 - 1e-10).all()):
        return True
    rest = -(x @ x.mT)
    rest.diagonal(dim1=-2, dim2=-1).add_(1 - 1e-10)
    return not torch.linalg.cholesky_ex(rest).info.any()


def _singular_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return singular values of x·2^-e in decreasing order, a 0 for an empty matrix; and e, (…)."""
    if not _checks.matrix("x", x).numel():
        return x.new_zeros(*x.shape[:-2], 1), x.new_zeros(x.shape[:-2])
    wide = exact(x)
    e = exponent(wide)
    return torch.linalg.svdvals(shift(wide, -e)), e[..., 0, 0]
