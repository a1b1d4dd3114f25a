"""Projection onto the operator-norm ball in the Frobenius metric."""

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._scaling import exponent, shift, unit_scale

_MODERATE = 100.0  # ‖X‖_F/radius up to which the Gram matrix resolves σ = radius to 1e-11


def project_operator_ball(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return the matrix of the ball ‖P‖_op ≤ `radius` nearest to `x` in the Frobenius norm.

    P = U min(Σ, radius) Vᵀ for x = UΣVᵀ, with ‖P‖_op ≤ radius up to the rounding of its entries to
    the dtype of `x`; a matrix inside the ball comes back unchanged.

    Args:
        x: matrices (…, m, n), float32, float64 or half; the work is done in float64.
        radius: of the ball, ≥ 0.
    """
    x = _checks.matrix("x", x)
    radius = _checks.nonnegative("radius", radius)
    copy = x.to(torch.float64, copy=True)  # what lies inside comes back, and must not be x itself
    return clip(copy, radius).to(x.dtype) if x.numel() else x.clone()


def truncated(x: Tensor, limit: float | Tensor) -> Tensor:
    """Return U min(Σ, limit) Vᵀ without checks; a tensor has a limit per matrix, (…, 1)."""
    u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
    return (u * sigma.clamp(max=limit).unsqueeze(-2)) @ vt


def clip(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return `project_operator_ball` of float64 without checks.

    It is X − U(1 − radius/Σ)₊UᵀX by the eigenvectors of the Gram matrix where those are exact.
    """
    norm = torch.linalg.matrix_norm(x)
    moderate = 2.0**-400 <= radius <= 2.0**400  # the squares are far from the ends of the range
    if moderate and bool((norm <= radius).all()):
        return x
    if not (moderate and bool((norm <= _MODERATE * radius).all())):
        u, sigma, vt = torch.linalg.svd(unit_scale(x), full_matrices=False)
        sigma = shift(sigma, exponent(x).squeeze(-1))
        clipped = (u * sigma.clamp(max=radius).unsqueeze(-2)) @ vt
        return torch.where((sigma <= radius).all(-1)[..., None, None], x, clipped)
    if x.shape[-2] > x.shape[-1]:
        return clip(x.mT, radius).mT
    squares, u = torch.linalg.eigh(x @ x.mT)  # ascending: those outside the ball come last
    outside = int((squares > radius**2).sum(-1).max())
    if not outside:
        return x
    u, squares = u[..., -outside:], squares[..., -outside:]
    excess = (1 - radius * squares.clamp(min=radius**2).rsqrt()).unsqueeze(-2)
    return x - (u * excess) @ (u.mT @ x)
