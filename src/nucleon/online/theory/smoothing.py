"""The lemmas behind the stochastic smoothing's constants, as inequalities (Appendix E)."""

import math

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.online.theory._statistics import Sides, alike


def nuclear_hessian(x: Tensor, direction: Tensor) -> Sides:
    """Return both sides of ∇²‖X‖_*[D, D] ≤ Tr(Dᵀ(XXᵀ)^{-1/2}D), X of full row rank (Lemma E.1).

    The left side is exact: with P = (XXᵀ)^{1/2} = U diag(σ) Uᵀ and B = Uᵀ(DXᵀ + XDᵀ)U it is
    Tr(DᵀP^{-1}D) − ½Σ_{ij} B_ij²/(σ_iσ_j(σ_i + σ_j)), P's derivative solving a Sylvester equation.
    """
    x = _checks.matrix("x", x).double()
    direction = alike("direction", direction, "x", x)
    u, sigma, _ = torch.linalg.svd(x, full_matrices=False)
    rank_floor = max(x.shape[-2:]) * torch.finfo(x.dtype).eps * sigma[..., :1]
    if x.shape[-2] > x.shape[-1] or (sigma <= rank_floor).any():
        raise ValueError(
            f"x must have full row rank, got shape {tuple(x.shape)} and smallest singular value "
            f"{sigma.min().item():.3g}; the nuclear norm is not twice differentiable there"
        )
    right = ((u.mT @ direction).square().sum(-1) / sigma).sum(-1)
    cross = direction @ x.mT
    change = u.mT @ (cross + cross.mT) @ u
    rows, columns = sigma.unsqueeze(-1), sigma.unsqueeze(-2)
    curvature = (change.square() / (rows * columns * (rows + columns))).sum((-2, -1)) / 2
    return Sides(right - curvature, right)


def inverse_chi_square(degrees: int, noncentrality: float) -> Sides:
    """Return both sides of E[1/χ²_k(λ)] = E[1/(k−2+2J)] ≤ 1/(k−2), J ~ Poisson(λ/2) (Lemma E.2)."""
    degrees = _checks.count("degrees", degrees, minimum=3)
    mean = _checks.nonnegative("noncentrality", noncentrality) / 2
    # Poisson's mass lies within 12 deviations of its mean but for less than one rounding (60 covers
    # small means, where the tail is not yet Gaussian).
    reach = 12 * math.sqrt(mean) + 60
    first = max(0, math.floor(mean - reach))
    j = torch.arange(first, math.ceil(mean + reach), dtype=torch.float64)
    logs = torch.xlogy(j, torch.tensor(mean, dtype=torch.float64)) - mean - torch.lgamma(j + 1)
    expectation = (logs.exp() / (degrees - 2 + 2 * j)).sum()
    return Sides(expectation, torch.tensor(1 / (degrees - 2), dtype=torch.float64))


def inverse_wishart(shift: Tensor, noise: Tensor) -> Sides:
    """Return both sides of λ_max E[((Z+Y)(Z+Y)ᵀ)^{-1}] ≤ 1/(n−m−1), n ≥ m+2 (Lemma E.3).

    The expectation is the mean over the given `noise`, (samples, …, m, n), so the left side is an
    estimate (biased upwards, as the largest eigenvalue of a mean is). `shift` is Y, (…, m, n).
    """
    shift = _checks.matrix("shift", shift).double()
    m, n = shift.shape[-2:]
    if n < m + 2:
        raise ValueError(f"shift must have at least m + 2 columns, got {m}×{n}; pad it with zeros")
    shifted = alike("noise", noise, "shift", shift) + shift
    mean = torch.linalg.inv(shifted @ shifted.mT).mean(0)
    left = torch.linalg.eigvalsh(mean)[..., -1]
    return Sides(left, torch.full_like(left, 1 / (n - m - 1)))
