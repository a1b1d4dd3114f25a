"""The inverse square root of a positive semidefinite matrix."""

import math
from typing import Literal, overload

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import full_float32
from nucleon.linalg._scaling import exponent, shift
from nucleon.linalg.convergence import Convergence

RootMethod = Literal["eigh", "newton-schulz"]
METHODS: tuple[RootMethod, ...] = ("eigh", "newton-schulz")


@overload
def inverse_sqrt(
    a: Tensor,
    method: RootMethod = "eigh",
    *,
    steps: int | None = None,
    rank_tolerance: float | None = None,
    report: Literal[False] = False,
) -> Tensor: ...
@overload
def inverse_sqrt(
    a: Tensor,
    method: RootMethod = "eigh",
    *,
    steps: int | None = None,
    rank_tolerance: float | None = None,
    report: Literal[True],
) -> tuple[Tensor, Convergence]: ...
@full_float32()
def inverse_sqrt(
    a: Tensor,
    method: RootMethod = "eigh",
    *,
    steps: int | None = None,
    rank_tolerance: float | None = None,
    report: bool = False,
) -> Tensor | tuple[Tensor, Convergence]:
    """A^(-1/2) of symmetric positive semidefinite matrices (…, m, m), A^(-1/2) A A^(-1/2) = I.

    Args:
        a: the matrices; float32 and half precision are computed in float64 by `"eigh"`, half
            precision in float32 by `"newton-schulz"`.
        method: `"eigh"`, the reference, takes eigenvalues up to rank_tolerance·λ_max for zero and
            returns the pseudo-inverse root. `"newton-schulz"` is the coupled iteration of the
            paper's Appendix F.3 on A + δI, δ = `floor(dtype)`·‖A‖_F: smaller eigenvalues of A are
            rounding, and would drive the iteration to infinity.
        steps: steps of the coupled iteration; None takes enough for every eigenvalue down to δ.
        rank_tolerance: relative eigenvalue that `"eigh"` takes for zero, and
            below which `report` does not look; None is √m·eps.
        report: also return a `Convergence` with the residual ‖ZAZ − I‖_F/√r over the r
            eigenvectors of A above the rank tolerance.
    """
    _checks.positive_semidefinite("a", _checks.symmetric("a", a))
    _checks.choice("method", method, METHODS)
    if steps is not None:
        _checks.count("steps", steps)
        if method == "eigh":
            raise ValueError("steps applies to method='newton-schulz' only, not to 'eigh'")
    if rank_tolerance is not None:
        _checks.fraction("rank_tolerance", rank_tolerance, closed="0")
    wide = torch.float64 if method == "eigh" else _checks.work_dtype(a.dtype)
    even = 2 * torch.div(exponent(a.to(wide)) + 1, 2, rounding_mode="floor")
    unit = shift(a.to(wide), -even)
    rounding = math.sqrt(a.shape[-1]) * torch.finfo(a.dtype).eps
    tolerance = rounding if rank_tolerance is None else rank_tolerance
    if method == "eigh":
        values, vectors = psd_eigh(unit)
        root = (vectors * _inverse_sqrt_values(values, tolerance).unsqueeze(-2)) @ vectors.mT
        taken = 0
    else:
        taken = coupled_steps(wide) if steps is None else steps
        root = coupled_inverse_sqrt(unit, taken)
    result = shift(root, -torch.div(even, 2, rounding_mode="floor")).to(a.dtype)
    if not report:
        return result
    residual = _residual(unit.double(), root.double(), tolerance)
    return result, Convergence(residual, math.sqrt(torch.finfo(a.dtype).eps), taken)


def floor(dtype: torch.dtype) -> float:
    """The relative floor δ/‖A‖_F of the coupled iteration: what rounding may take from A.

    It keeps every eigenvalue of A + δI positive, and so the iteration bounded.
    """
    return _checks.ROUNDING * torch.finfo(dtype).eps


def coupled_steps(dtype: torch.dtype) -> int:
    """Steps of x ← x(3 − x²)/2 from x = √δ, the smallest the floor admits, to 1 − eps."""
    eps = torch.finfo(dtype).eps
    x, steps = math.sqrt(floor(dtype)), 0
    while 1 - x > eps:
        x, steps = x * (3 - x * x) / 2, steps + 1
    return steps


def coupled_inverse_sqrt(a: Tensor, steps: int) -> Tensor:
    """(A + δI)^(-1/2) by `steps` of the coupled Newton–Schulz iteration; unchecked, no sync.

    With A normalized by its Frobenius norm: T = ZY, Y ← Y(3I − T)/2, Z ← (3I − T)Z/2 from Y = A,
    Z = I; Y tends to A^(1/2), Z to A^(-1/2). Three m×m products, 6m³ flops, a step.
    """
    norm = torch.linalg.matrix_norm(a, keepdim=True)
    norm = torch.where(norm > 0, norm, torch.inf)  # so that 0 gives 0
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    y = a / norm + floor(a.dtype) * eye
    z = eye.expand_as(a)
    for _ in range(steps):
        t = 1.5 * eye - 0.5 * (z @ y)
        y, z = y @ t, t @ z
    return z * norm.rsqrt()


def psd_eigh(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, those that rounding made negative set to 0, and eigenvectors; unchecked."""
    values, vectors = torch.linalg.eigh(a)
    return values.clamp_min(0), vectors


def _inverse_sqrt_values(values: Tensor, tolerance: float) -> Tensor:
    cut = tolerance * values.amax(-1, keepdim=True) if values.shape[-1] else values
    return torch.where(values > cut, values, torch.inf).rsqrt()


def _residual(a: Tensor, z: Tensor, tolerance: float) -> Tensor:
    if a.shape[-1] == 0:
        return a.new_zeros(a.shape[:-2])
    values, vectors = torch.linalg.eigh(a)
    kept = (values > tolerance * values[..., -1:]).double()
    defect = vectors.mT @ z @ a @ z @ vectors - torch.eye(a.shape[-1], dtype=a.dtype).to(a.device)
    masked = kept.unsqueeze(-1) * defect * kept.unsqueeze(-2)
    return torch.linalg.matrix_norm(masked) / kept.sum(-1).clamp_min(1).sqrt()
