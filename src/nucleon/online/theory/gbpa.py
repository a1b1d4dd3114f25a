"""Regret bounds of the gradient-based prediction algorithm and its instances (Sections 3 and 4).

Throughout, `gram` is M_T = Σ G_tG_tᵀ on the short side, (…, m, m), and a bound has the batch's
shape. In the discounted game `gram` is M̂_T = Σ γ^{2(T-t)} G_tG_tᵀ, see `nucleon.certificate`.
"""

import math

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Real, check_width, checked_eta, preconditioner_trace, real


def faml_bound(
    gram: Tensor, *, radius: float, gradient_bound: Real, discount: float = 1.0
) -> Tensor:
    """Bound the regret of FAML as printed, by 2D(Tr M̂_T^{1/2} + mG/γ) (Theorem 4.2, η = 1).

    `gbpa_bound` with α = β = 1 is never larger.
    """
    return 2 * _checks.positive("radius", radius) * _loose_trace(gram, gradient_bound, discount)


def ftpl_bound(
    gram: Tensor, *, width: int, radius: float, gradient_bound: Real, discount: float = 1.0
) -> Tensor:
    """Bound the regret of FTPL as printed, by 2√2·C·D(Tr M̂_T^{1/2} + mG/γ) (Theorem 4.1).

    `width` is n' ≥ m+2, the number of columns after padding with zeros, which leaves the nuclear
    norm as it is; without padding it is n. `gbpa_bound` with `ftpl_constants` is never larger. The
    bound is on the expected action against a stream fixed before the noise is drawn.
    """
    constant = 2 * math.sqrt(2) * ftpl_factor(gram.shape[-1], width)
    return (
        constant * _checks.positive("radius", radius) * _loose_trace(gram, gradient_bound, discount)
    )


def ftpl_factor(rows: int, width: int) -> float:
    """Return C = (n'/(n'−m−1))^{1/4}, the factor of FTPL and Pion (Theorems 4.1 and 5.2)."""
    check_width(rows, width)
    return (width / (width - rows - 1)) ** 0.25


def scalar_gbpa_bound(
    square_sum: Tensor,
    *,
    rows: int,
    radius: float,
    gradient_bound: Real,
    alpha: float,
    beta: float,
    first_frobenius: Real,
    eta: float | None = None,
) -> Tensor:
    """Bound the regret of GBPA with a scalar preconditioner ℓ_tI, the baseline of Section 3.

    ℓ_t = √(G² + Σ‖G_s‖_F²),  Reg_T ≤ D((βη + mα/η) ℓ_T + (√m − βη)‖G_1‖_F)

    With η = √(mα/β), the default, the leading term is 2√(αβ)·√m·D·√Σ‖G_t‖_F². The √m is missing in
    the paper and cannot be: on T independent random signs times I every learner's expected regret
    is Dm·E|Σ±1| ≈ 0.8·Dm√T, above D√(mT). Here G bounds ‖G_t‖_F, `square_sum` is Σ‖G_t‖_F², (…).
    """
    rows = _checks.count("rows", rows)
    eta = checked_eta(eta, alpha, beta, rows)
    total = real("square_sum", square_sum, square_sum)
    level = (real("gradient_bound", gradient_bound, total) ** 2 + total).sqrt()
    first = (math.sqrt(rows) - beta * eta) * real("first_frobenius", first_frobenius, total)
    return _checks.positive("radius", radius) * ((beta * eta + alpha * rows / eta) * level + first)


def bregman_bound(gradient: Tensor, smoothing: Tensor, *, beta: float) -> Tensor:
    """Return β/2·Tr(GᵀΛ^{-1/2}G) ≥ B(S+G‖S), one Bregman term of Lemma 3.1 (Definition 3.1).

    `smoothing` is Λ = L_tL_tᵀ/η² ≻ 0 before the gradient `gradient`, (…, m, n).
    """
    gradient = _checks.matrix("gradient", gradient).double()
    values, vectors = torch.linalg.eigh(
        _checks.symmetric("smoothing", smoothing, size=gradient.shape[-2]).double()
    )
    if values.numel() and (values <= 0).any():
        raise ValueError(
            f"smoothing must be positive definite, its smallest eigenvalue is "
            f"{values.min().item():.3g}; add gradient_bound² to the diagonal"
        )
    energy = (vectors.mT @ gradient).square().sum(-1)
    return _checks.positive("beta", beta) / 2 * (energy / values.sqrt()).sum(-1)


def stability_bound(before: Tensor, after: Tensor, *, alpha: float) -> Tensor:
    """Return α(Tr√Λ' − Tr√Λ) ≥ Ψ(S; Λ') − Ψ(S; Λ), a stability term of Lemma 3.1.

    With Λ = 0 it bounds the first round: Ψ(G_1; Λ') ≤ ‖G_1‖_* + α Tr√Λ'.
    """
    larger, smaller = (preconditioner_trace(x, gradient_bound=0.0) for x in (after, before))
    return _checks.positive("alpha", alpha) * (larger - smaller)


def spectral_excess(gradient: Tensor, gradient_bound: Real) -> Tensor:
    """Return Σ_i (σ_i − h)_+ = min ‖G − Ḡ‖_* over ‖Ḡ‖_op ≤ h, the part of G above h."""
    values = torch.linalg.svdvals(_checks.matrix("gradient", gradient).double())
    level = real("gradient_bound", gradient_bound, values.sum(-1)).unsqueeze(-1)
    return (values - level).clamp(min=0).sum(-1)


def _loose_trace(gram: Tensor, gradient_bound: Real, discount: float) -> Tensor:
    """Return Tr M̂_T^{1/2} + mG/γ ≥ Tr √(G²γ^{-2}I + M̂_T)."""
    discount = _checks.fraction("discount", discount, closed="1")
    root = preconditioner_trace(gram, gradient_bound=0.0)
    return root + gram.shape[-1] * real("gradient_bound", gradient_bound, root) / discount
