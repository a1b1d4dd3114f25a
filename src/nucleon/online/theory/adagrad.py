"""Regret of the vector methods of Appendix B on the ℓ2 and the ℓ∞ ball of radius D.

`moment` is Σ g_{t,i}², (…, d), for the scalar and the diagonal preconditioner, and Σ g_tg_tᵀ,
(…, d, d), for the full one. Distances are measured in ℓ2 for scalar and full, in ℓ∞ for diagonal.
The paper calls the diameter of the ball D; by its own definition it is 2D, which matters to OGD and
proximal FTRL. FTRL regularizes around the center x_1 = 0, from which every point is within D.
"""

import math
from typing import Literal

from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Real, preconditioner_trace, real
from nucleon.online.metric import Ball

Preconditioner = Literal["scalar", "diagonal", "full"]
Update = Literal["ogd", "ftrl", "proximal"]


def adagrad_bound(
    moment: Tensor,
    *,
    preconditioner: Preconditioner,
    update: Update,
    ball: Ball,
    radius: float,
    eta: float | None = None,
    delta: Real = 0.0,
    excess: Real = 0.0,
) -> Tensor:
    """Bound the regret of AdaGrad, H_t = δI + a root of the moment (Table 2).

    Reg_T ≤ (R²/(2η) + η)·Tr H + δR₂²/(2η) + 2D_p·excess

    Tr H is √Σ‖g_t‖², Σ_i√Σg_{t,i}² or Tr√Σg_tg_tᵀ, D_p the radius of the ball in the
    preconditioner's norm, R = D_p for FTRL and 2D_p for OGD and proximal FTRL, R₂ the same in ℓ2.
    η = R/√2 by default, which makes the leading term √2·R·Tr H. FTRL needs δ ≥ max‖g_t‖ (ℓ2 for
    scalar and full, ℓ∞ for diagonal). If δ grows as the running maximum, `excess` = Σ‖e_t‖ of the
    parts above it (ℓ2, or ℓ1 for diagonal) makes the bound unconditional, clipped or not (Remark
    B.1). Proximal FTRL needs no δ (McMahan 2017).
    """
    _checks.choice("update", update, ("ogd", "ftrl", "proximal"))
    trace = adagrad_trace(moment, preconditioner)
    reach = 1 if update == "ftrl" else 2
    norm = ball_radius(preconditioner, ball, radius, moment.shape[-1])
    euclidean = ball_radius("scalar", ball, radius, moment.shape[-1])
    eta = reach * norm / math.sqrt(2) if eta is None else _checks.positive("eta", eta)
    leading = ((reach * norm) ** 2 / (2 * eta) + eta) * trace
    offset = real("delta", delta, trace) * (reach * euclidean) ** 2 / (2 * eta)
    return leading + offset + 2 * norm * real("excess", excess, trace)


def scale_free_adagrad_bound(
    moment: Tensor,
    *,
    peak: Real,
    preconditioner: Literal["scalar", "diagonal"],
    ball: Ball,
    radius: float,
    eta: float | None = None,
) -> Tensor:
    """Bound the regret of scalar or diagonal AdaGrad-FTRL with δ = 0 (Remark B.1).

    Reg_T ≤ (D_p²/(2η) + √2·η)·Tr H + (2+√2)·2D_p·peak,  peak = max‖g_t‖₂ or Σ_i max_t|g_{t,i}|

    In the manner of Orabona and Pál (2018): a round costs at most ηg_t²/(2h_{t-1}) and at most
    2D_p|g_t|. Where |g_t| ≤ h_{t-1} the first is ≤ ηg_t²/(√2·h_t), and these sum to √2·η·h_T; the
    other rounds double h², so their |g_t| sum to at most (2+√2)·max|g_t|. The default
    η = D_p/2^{3/4} minimizes the leading term.
    """
    _checks.choice("preconditioner", preconditioner, ("scalar", "diagonal"))
    trace = adagrad_trace(moment, preconditioner)
    norm = ball_radius(preconditioner, ball, radius, moment.shape[-1])
    eta = norm / 2**0.75 if eta is None else _checks.positive("eta", eta)
    leading = (norm**2 / (2 * eta) + math.sqrt(2) * eta) * trace
    return leading + (2 + math.sqrt(2)) * 2 * norm * real("peak", peak, trace)


def gaussian_ftpl_constants(dimension: int) -> tuple[float, float]:
    """Return (α, β) = (E‖u‖, E‖u‖^{-1}) of s ↦ E‖s + ℓu‖₂, u ~ N(0, I_d), d ≥ 2.

    The Hessian of the norm is at most I/‖x‖, and E‖s + ℓu‖^{-1} is largest at s = 0 (the Poisson
    mixture of Lemma E.2). αβ falls from π/2 to 1, sharper than Theorem 4.1 with m = 1.
    """
    half = _checks.count("dimension", dimension, minimum=2) / 2
    mean = math.sqrt(2) * math.exp(math.lgamma(half + 0.5) - math.lgamma(half))
    inverse = math.exp(math.lgamma(half - 0.5) - math.lgamma(half)) / math.sqrt(2)
    return mean, inverse


def adagrad_trace(moment: Tensor, preconditioner: Preconditioner) -> Tensor:
    """Return √Σ‖g_t‖², Σ_i√Σ_t g_{t,i}² or Tr√Σg_tg_tᵀ, to which regret grows (Table 2)."""
    _checks.choice("preconditioner", preconditioner, ("scalar", "diagonal", "full"))
    if preconditioner == "full":
        return preconditioner_trace(moment, gradient_bound=0.0)
    squares = real("moment", moment, moment)
    return squares.sum(-1).sqrt() if preconditioner == "scalar" else squares.sqrt().sum(-1)


def ball_radius(preconditioner: Preconditioner, ball: Ball, radius: float, dimension: int) -> float:
    """Return D_p, the radius of the ball in ℓ∞ for the diagonal preconditioner, else in ℓ2."""
    _checks.choice("ball", ball, ("l2", "linf"))
    wide = ball == "linf" and preconditioner != "diagonal"
    return _checks.positive("radius", radius) * (math.sqrt(dimension) if wide else 1.0)
