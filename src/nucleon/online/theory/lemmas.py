"""Inequalities and identities of the proofs, as functions that return both sides.

They check what their statements assume, and otherwise leave errors to torch.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import preconditioner_trace
from nucleon.online.metric import Root
from nucleon.online.theory.shampoo import quarter_roots


class Sides(NamedTuple):
    """The two sides of an inequality left ≤ right (or of an identity), for a test or a table."""

    left: Tensor
    right: Tensor


def admissibility_tradeoff(x: Tensor, root: Tensor, *, alpha: float, beta: float) -> Sides:
    """Return both sides of ‖X‖_* ≤ α Tr L + β/2·Tr(XᵀL^{-1}X) for L ≻ 0 (Prop. 3.3).

    At L = √(β/2α)·√(XXᵀ) the right side is √(2αβ)‖X‖_*, which is why αβ ≥ ½. `root` is L.
    """
    x, root = x.double(), root.double()
    quadratic = (x * torch.linalg.solve(root, x)).sum((-2, -1))
    right = alpha * root.diagonal(dim1=-2, dim2=-1).sum(-1) + beta / 2 * quadratic
    return Sides(torch.linalg.svdvals(x).sum(-1), right)


def mirror_descent_regret(
    gradients: Tensor,
    actions: Tensor,
    comparator: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    eta: float,
) -> Sides:
    """Return both sides of Σ⟨G_t, X_t − X⟩ ≤ drift/(2η) + η/2·ΣTr(G_tᵀL_t⁺G_tR_t⁺) (Prop. C.2).

    The drift is d_1(X_1) + Σ_{t≥2} [d_t(X_t) − d_{t-1}(X_t)] with the squared distance
    d_t(Y) = Tr((Y−X)ᵀL_t(Y−X)R_t). `gradients` and `actions` are (…, T, m, n), `left` (…, T, m, m),
    `right` (…, T, n, n).
    """
    gradients, left, right = gradients.double(), left.double(), right.double()
    away = actions.double() - comparator.double().unsqueeze(-3)
    inverses = _preconditioned(gradients, left, right, 1.0)
    bound = _drift(away, left, right) / (2 * eta) + eta / 2 * _inner(gradients, inverses)
    return Sides(_inner(gradients, away), bound)


def matrix_potential(gradients: Tensor) -> Sides:
    """Return both sides of ΣTr(G_tᵀM_t^{-1/2}G_t) ≤ 2Tr√M_T, gradients (…, T, m, n) (Lemma C.3).

    Its second half, with N_t = ΣG_sᵀG_s, is this one on the transposed gradients.
    """
    rows, _ = _running_grams(gradients)
    bound = 2 * preconditioner_trace(rows[..., -1, :, :], gradient_bound=0.0)
    return Sides(_inner(gradients, Root(rows, 0.0, 0.5).solve(gradients.double())), bound)


def shampoo_gradient_term(gradients: Tensor) -> Sides:
    """Return ΣTr(G_tᵀM_t^{-1/4}G_tN_t^{-1/4}) ≤ 2√(Tr M_T^{1/2}·Tr N_T^{1/2}) (Lemma C.4)."""
    rows, columns = _running_grams(gradients)
    weighted = _preconditioned(gradients.double(), rows, columns, 0.25)
    left, right = quarter_roots(rows[..., -1, :, :], columns[..., -1, :, :])
    bound = 2 * (left.square().sum(-1) * right.square().sum(-1)).sqrt()
    return Sides(_inner(gradients, weighted), bound)


def shampoo_distance_term(
    gradients: Tensor, actions: Tensor, comparator: Tensor, *, radius: float
) -> Sides:
    """Return the drift of Shampoo's distances ≤ 4D²(‖L_T‖_op Tr R_T + Tr L_T ‖R_T‖_op) (Lemma C.5).

    The drift is that of `mirror_descent_regret` with L_t = M_t^{1/4}, R_t = N_t^{1/4}, for actions
    and a comparator in the ball of radius D.
    """
    rows, columns = _running_grams(gradients)
    away = actions.double() - comparator.double().unsqueeze(-3)
    left, right = quarter_roots(rows[..., -1, :, :], columns[..., -1, :, :])
    bound = left.amax(-1) * right.sum(-1) + left.sum(-1) * right.amax(-1)
    roots = (Root(gram, 0.0, 0.25).matrix for gram in (rows, columns))
    return Sides(_drift(away, *roots), 4 * radius**2 * bound)


def full_against_scalar(gram: Tensor) -> Sides:
    """Return both sides of √Σ‖g_t‖² ≤ Tr√Σg_tg_tᵀ: scalar's bound is the smaller (Remark B.2)."""
    scalar = gram.double().diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    return Sides(scalar, preconditioner_trace(gram, gradient_bound=0.0))


def nuclear_hessian(x: Tensor, direction: Tensor) -> Sides:
    """Return both sides of ∇²‖X‖_*[D, D] ≤ Tr(Dᵀ(XXᵀ)^{-1/2}D), X of full row rank (Lemma E.1).

    The left side is exact: with P = (XXᵀ)^{1/2} = U diag(σ) Uᵀ and B = Uᵀ(DXᵀ + XDᵀ)U it is
    Tr(DᵀP^{-1}D) − ½Σ_{ij} B_ij²/(σ_iσ_j(σ_i + σ_j)), P's derivative solving a Sylvester equation.
    """
    x, direction = x.double(), direction.double()
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
    m, n = shift.shape[-2:]
    if n < m + 2:
        raise ValueError(f"shift must have at least m + 2 columns, got {m}×{n}; pad it with zeros")
    shifted = noise.double() + shift.double()
    mean = torch.linalg.inv(shifted @ shifted.mT).mean(0)
    left = torch.linalg.eigvalsh(mean)[..., -1]
    return Sides(left, torch.full_like(left, 1 / (n - m - 1)))


def loss_decomposition(losses: Tensor, *, discount: float) -> Sides:
    """Return L(W_T) − L(W_0) and its discounted sums of differences, an identity (Lemma G.2).

    The right side is Σ_t γ^{T-t}δ_t + (1−γ)Σ_{t<T} Σ_{s≤t} γ^{t-s}δ_s, δ_t = L(W_t) − L(W_{t-1});
    `losses` is L(W_0)…L(W_T), (T+1,).
    """
    steps = losses.double().diff()
    sums = [torch.zeros((), dtype=torch.float64)]
    for step in steps:
        sums.append(discount * sums[-1] + step)
    inner = torch.stack(sums)
    right = inner[-1] + (1 - discount) * inner[:-1].sum()
    return Sides(losses[-1].double() - losses[0].double(), right)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ⟨A_t, B_t⟩ over the rounds."""
    return (a * b).sum((-3, -2, -1))


def _drift(away: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return d_1 + Σ_{t≥2} [d_t − d_{t-1}] of the points Y_t − X."""
    later = away[..., 1:, :, :]
    earlier = left[..., :-1, :, :] @ later @ right[..., :-1, :, :]
    return _inner(away, left @ away @ right) - _inner(later, earlier)


def _running_grams(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return M_1 … M_T and N_1 … N_T."""
    gradients = gradients.double()
    return (gradients @ gradients.mT).cumsum(-3), (gradients.mT @ gradients).cumsum(-3)


def _preconditioned(g: Tensor, left: Tensor, right: Tensor, power: float) -> Tensor:
    """Return L^{-p} G R^{-p} by pseudo-inverses."""
    return Root(right, 0.0, power).solve(Root(left, 0.0, power).solve(g).mT).mT
