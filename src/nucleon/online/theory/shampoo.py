"""Regret of Shampoo and one-sided Shampoo with the quadratic projection (Section 2, Appendix C).

The diameter of the ball of radius D in the operator norm is 2D. `epsilon` is the εI added to each
Gram matrix so that early preconditioners are invertible; with ε = 0 the bounds hold for the
pseudo-inverse, since G_t lies in the range of M_t. `gaps` is Σg_t, where the subproblem behind
X_{t+1} was solved to the Frank–Wolfe gap g_t = max_{‖X‖≤D} ⟨∇F_t(X_{t+1}), X_{t+1} − X⟩ with
F_t(X) = ⟨G_t, X⟩ + Tr((X−X_t)ᵀL_t(X−X_t)R_t)/(2η). The proof of Proposition C.2 uses optimality
only as ⟨∇F_t(X_{t+1}), X_{t+1} − X⟩ ≤ 0, so an inexact solution adds exactly g_t.
"""

import math

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Real, real, spectrum
from nucleon.online.theory._statistics import Sides, alike, root_trace, stream


def one_sided_shampoo_bound(
    gram: Tensor,
    *,
    radius: float,
    eta: float | None = None,
    epsilon: float = 0.0,
    gaps: Real = 0.0,
) -> Tensor:
    """Bound the regret of one-sided Shampoo/ASGO, L_t = (εI + M_t)^{1/2}, R = I (Table 1).

    Reg_T ≤ (2D²/η) Tr L_T + η(Tr L_T − m√ε) + gaps

    With η = √2·D, the default, and ε = 0 this is 2√2·D·Tr M_T^{1/2} (2D is the diameter; the paper
    calls it D). From Proposition C.2 and Lemma C.3.
    """
    radius, epsilon = _checks.positive("radius", radius), _checks.nonnegative("epsilon", epsilon)
    eta = math.sqrt(2) * radius if eta is None else _checks.positive("eta", eta)
    root = root_trace("gram", gram, epsilon)
    grown = root - gram.shape[-1] * math.sqrt(epsilon)
    return 2 * radius**2 / eta * root + eta * grown + real("gaps", gaps, root)


def shampoo_bound(
    gram: Tensor,
    column_gram: Tensor,
    *,
    radius: float,
    eta: float | None = None,
    epsilon: float = 0.0,
    gaps: Real = 0.0,
) -> Tensor:
    """Bound the regret of Shampoo, L_t = (εI + M_t)^{1/4}, R_t = (εI + N_t)^{1/4} (Theorem C.1).

    Reg_T ≤ (2D²/η)(‖L_T‖_op Tr R_T + Tr L_T ‖R_T‖_op)
            + η√((Tr L_T² − m√ε)(Tr R_T² − n√ε)) + gaps

    by Lemmas C.4 and C.5 in Proposition C.2. `gram` is M_T = ΣG_tG_tᵀ, `column_gram` is
    N_T = ΣG_tᵀG_t; η = √2·D by default.
    """
    radius, epsilon = _checks.positive("radius", radius), _checks.nonnegative("epsilon", epsilon)
    eta = math.sqrt(2) * radius if eta is None else _checks.positive("eta", eta)
    left, right = _quarter_roots(gram, column_gram, epsilon)
    distance = _peak(left) * right.sum(-1) + left.sum(-1) * _peak(right)
    grown_left = left.square().sum(-1) - left.shape[-1] * math.sqrt(epsilon)
    grown_right = right.square().sum(-1) - right.shape[-1] * math.sqrt(epsilon)
    gradient = (grown_left.clamp(min=0) * grown_right.clamp(min=0)).sqrt()
    return 2 * radius**2 / eta * distance + eta * gradient + real("gaps", gaps, distance)


def original_shampoo_bound(
    gram: Tensor, column_gram: Tensor, *, radius: float, rank: int, epsilon: float = 0.0
) -> Tensor:
    """Bound the regret of Shampoo by Gupta, Koren and Singer (2018, Theorem 7).

    √(2r)·‖X‖_F·Tr(εI + M_T)^{1/4}·Tr(εI + N_T)^{1/4}, with ‖X‖_F = 2D√min(m, n) the diameter of the
    operator-norm ball in the Frobenius norm, r ≥ rank G_t, and their η = ‖X‖_F/√(2r).
    """
    epsilon = _checks.nonnegative("epsilon", epsilon)
    left, right = _quarter_roots(gram, column_gram, epsilon)
    short = min(left.shape[-1], right.shape[-1])
    diameter = 2 * _checks.positive("radius", radius) * math.sqrt(short)
    constant = math.sqrt(2 * _checks.count("rank", rank)) * diameter
    return constant * left.sum(-1) * right.sum(-1)


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
    gradients = stream("gradients", gradients)
    actions = alike("actions", actions, "gradients", gradients)
    left, right = stream("left", left), stream("right", right)
    away = actions - alike("comparator", comparator, "gradients", gradients).unsqueeze(-3)
    regret = (gradients * away).sum((-3, -2, -1))
    inverses = _power(left, -1.0) @ gradients @ _power(right, -1.0)
    energy = (gradients * inverses).sum((-3, -2, -1))
    eta = _checks.positive("eta", eta)
    return Sides(regret, _drift(away, left, right) / (2 * eta) + eta / 2 * energy)


def matrix_potential(gradients: Tensor) -> Sides:
    """Return both sides of ΣTr(G_tᵀM_t^{-1/2}G_t) ≤ 2Tr√M_T, gradients (…, T, m, n) (Lemma C.3).

    Its second half, with N_t = ΣG_sᵀG_s, is this one on the transposed gradients.
    """
    gradients = stream("gradients", gradients)
    grams = (gradients @ gradients.mT).cumsum(-3)
    weighted = _power(grams, -0.5) @ gradients
    return Sides(
        (gradients * weighted).sum((-3, -2, -1)), 2 * root_trace("gradients", grams[..., -1, :, :])
    )


def shampoo_gradient_term(gradients: Tensor) -> Sides:
    """Return ΣTr(G_tᵀM_t^{-1/4}G_tN_t^{-1/4}) ≤ 2√(Tr M_T^{1/2}·Tr N_T^{1/2}) (Lemma C.4)."""
    gradients = stream("gradients", gradients)
    rows, columns = _running_grams(gradients)
    weighted = _power(rows, -0.25) @ gradients @ _power(columns, -0.25)
    left, right = _quarter_roots(rows[..., -1, :, :], columns[..., -1, :, :], 0.0)
    bound = 2 * (left.square().sum(-1) * right.square().sum(-1)).sqrt()
    return Sides((gradients * weighted).sum((-3, -2, -1)), bound)


def shampoo_distance_term(
    gradients: Tensor, actions: Tensor, comparator: Tensor, *, radius: float
) -> Sides:
    """Return the drift of Shampoo's distances ≤ 4D²(‖L_T‖_op Tr R_T + Tr L_T ‖R_T‖_op) (Lemma C.5).

    The drift is that of `mirror_descent_regret` with L_t = M_t^{1/4}, R_t = N_t^{1/4}, for actions
    and a comparator in the ball of radius D.
    """
    gradients = stream("gradients", gradients)
    actions = alike("actions", actions, "gradients", gradients)
    rows, columns = _running_grams(gradients)
    away = actions - alike("comparator", comparator, "gradients", gradients).unsqueeze(-3)
    drift = _drift(away, _power(rows, 0.25), _power(columns, 0.25))
    left, right = _quarter_roots(rows[..., -1, :, :], columns[..., -1, :, :], 0.0)
    bound = _peak(left) * right.sum(-1) + left.sum(-1) * _peak(right)
    return Sides(drift, 4 * _checks.positive("radius", radius) ** 2 * bound)


def _drift(away: Tensor, left: Tensor, right: Tensor) -> Tensor:
    def distances(points: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return (points * (rows @ points @ columns)).sum((-3, -2, -1))

    later = away[..., 1:, :, :]
    return distances(away, left, right) - distances(
        later, left[..., :-1, :, :], right[..., :-1, :, :]
    )


def _running_grams(gradients: Tensor) -> tuple[Tensor, Tensor]:
    return (gradients @ gradients.mT).cumsum(-3), (gradients.mT @ gradients).cumsum(-3)


def _quarter_roots(gram: Tensor, column_gram: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of (εI + M)^{1/4} and (εI + N)^{1/4}."""
    left = (spectrum("gram", gram) + epsilon) ** 0.25
    right = (spectrum("column_gram", column_gram) + epsilon) ** 0.25
    _checks.broadcastable("column_gram", right.shape[:-1], "gram", left.shape[:-1])
    return left, right


def _peak(values: Tensor) -> Tensor:
    return values.amax(-1) if values.shape[-1] else values.sum(-1)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Return A^p for a positive semidefinite A; a negative power acts on the range only."""
    values, vectors = torch.linalg.eigh(matrix)
    floor = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:].clamp(min=0)
    powers = torch.where(values > floor, values.clamp(min=0) ** exponent, torch.zeros_like(values))
    return (vectors * powers.unsqueeze(-2)) @ vectors.mT
