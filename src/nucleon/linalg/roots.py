"""Inverse square roots and triangular roots of positive semidefinite matrices."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import check_method, floor, full_float32, widest
from nucleon.linalg._scaling import exponent, shift
from nucleon.linalg.kernels import add_product, add_to_diagonal, lifted

RootMethod = Literal["eigh", "newton-schulz"]
METHODS: tuple[RootMethod, ...] = get_args(RootMethod)


@full_float32()
def inverse_sqrt(
    a: Tensor,
    method: RootMethod = "eigh",
    *,
    steps: int | None = None,
    rank_tolerance: float | None = None,
) -> Tensor:
    """Return A^(-1/2) of symmetric positive semidefinite matrices, A^(-1/2) A A^(-1/2) = I.

    Finite for every A that the dtype can hold, of any rank, subnormal numbers included; 0 gives 0.

    Args:
        a: the matrices, float32 or float64, since half precision cannot represent a Gram matrix.
        method: `"eigh"`, the reference in float64, takes eigenvalues up to rank_tolerance·λ_max for
            zero and returns the pseudo-inverse root. `"newton-schulz"` is the coupled iteration of
            the paper's Appendix F.3 on A + δI, δ = 32 eps·‖A‖_F: smaller eigenvalues of A are
            rounding, and would drive the iteration to infinity. To δ it adds what the rounding of
            subnormal numbers may have taken, 32m times the smallest one at most.
        steps: steps of the coupled iteration; None takes enough for every eigenvalue down to δ.
        rank_tolerance: relative eigenvalue that `"eigh"` takes for zero; None is √m·eps.
    """
    _checks.matrix("a", a, dtypes=_checks.FULL_DTYPES)
    _checks.positive_semidefinite("a", _checks.symmetric("a", a))
    if not a.numel():
        return a.clone()
    tolerance = check_method(a.dtype, a.shape[-1], method, METHODS, steps, rank_tolerance)
    if method != "eigh" and rank_tolerance is not None:
        raise ValueError(
            f"rank_tolerance does not apply to method={method!r}, whose floor is 32 eps·‖A‖_F, got "
            f"{rank_tolerance!r}; leave it out, or pass method='eigh'"
        )
    half = torch.div(exponent(a) + 1, 2, rounding_mode="floor")
    if method == "eigh":
        values, vectors = psd_eigh(shift(a.double(), -2 * half))
        kept = values > tolerance * values[..., -1:]  # ascending: of the largest
        inverse = torch.where(kept, values, torch.inf).rsqrt()
        root = (vectors * inverse.unsqueeze(-2)) @ vectors.mT
    else:
        steps = coupled_steps(a.dtype) if steps is None else steps
        root = coupled_inverse_sqrt(shift(lifted(a), -2 * half), steps)
    return shift(root, -half).to(a.dtype)


def coupled_steps(dtype: torch.dtype) -> int:
    """Count the steps of x ← x(3 − x²)/2 from √δ, the smallest the floor admits, to 1 − eps."""
    eps = torch.finfo(dtype).eps
    x, steps = math.sqrt(floor(dtype)), 0
    while 1 - x > eps:
        x, steps = x * (3 - x * x) / 2, steps + 1
    return steps


def coupled_inverse_sqrt(a: Tensor, steps: int) -> Tensor:
    """Return (A + δI)^(-1/2) by the coupled Newton–Schulz iteration; unchecked, no sync.

    With A normalized by its Frobenius norm: T = ZY, Y ← Y(3I − T)/2, Z ← (3I − T)Z/2 from Y = A,
    Z = I; Y tends to A^(1/2), Z to A^(-1/2). Three m×m products, 6m³ flops, a step.
    """
    # The square of a representable norm need not be representable.
    wide = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True, dtype=widest(a.device))
    wide = torch.where(wide > 0, wide, torch.inf)  # so that 0 gives 0
    norm = wide.to(a.dtype)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    y = add_to_diagonal(a / norm, floor(a.dtype))
    z = eye
    for _ in range(steps):
        t = add_product(eye, z, y, beta=1.5, alpha=-0.5)
        y, z = y @ t, t @ z
    return z * wide.rsqrt().to(a.dtype)


def cholesky_root(smoothing: Tensor, jitter: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the triangular L with LLᵀ = Λ + δ·diag Λ, and a mask of failures; no sync.

    The jitter δ, 8m·eps unless given, is relative to each row's own diagonal entry: a singular Λ
    has a factor, rows of any scale keep their digits, and Λ = 0 gives L = 0. Where Λ is indefinite
    beyond rounding, L = √(m·diag Λ), which is a root of an upper bound of every semidefinite Λ with
    that diagonal.
    """
    m = smoothing.shape[-1]
    delta = 8 * m * torch.finfo(smoothing.dtype).eps if jitter is None else jitter
    scale = smoothing.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    inverse = torch.where(scale > 0, scale, torch.inf).reciprocal()
    correlation = inverse.unsqueeze(-1) * smoothing * inverse.unsqueeze(-2)
    correlation.diagonal(dim1=-2, dim2=-1).fill_(1 + delta)
    factor, info = torch.linalg.cholesky_ex(correlation)
    failed: Tensor = info != 0
    bound = math.sqrt(m) * torch.eye(m, dtype=smoothing.dtype, device=smoothing.device)
    factor = torch.where(failed[..., None, None], bound, factor)
    return scale.unsqueeze(-1) * factor, failed


def psd_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, clipped at 0, and eigenvectors; unchecked."""
    values, vectors = torch.linalg.eigh(a)
    return values.clamp_min(0), vectors
