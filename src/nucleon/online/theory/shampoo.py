"""Regret of Shampoo and one-sided Shampoo with the quadratic projection (Section 2, Appendix C).

The diameter of the ball of radius D in the operator norm is 2D. `epsilon` is the εI added to each
Gram matrix so that early preconditioners are invertible; with ε = 0 the bounds hold for the
pseudo-inverse, since G_t lies in the range of M_t. `gaps` is Σg_t, where the subproblem behind
X_{t+1} was solved to the Frank–Wolfe gap g_t = max_{‖X‖≤D} ⟨∇F_t(X_{t+1}), X_{t+1} − X⟩ with
F_t(X) = ⟨G_t, X⟩ + Tr((X−X_t)ᵀL_t(X−X_t)R_t)/(2η). The proof of Proposition C.2 uses optimality
only as ⟨∇F_t(X_{t+1}), X_{t+1} − X⟩ ≤ 0, so an inexact solution adds exactly g_t.
"""

import math

from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Real, preconditioner_trace, real, spectrum


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
    root = preconditioner_trace(gram, gradient_bound=math.sqrt(epsilon))
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
    left, right = quarter_roots(gram, column_gram, epsilon)
    distance = left.amax(-1) * right.sum(-1) + left.sum(-1) * right.amax(-1)
    grown_left = left.square().sum(-1) - left.shape[-1] * math.sqrt(epsilon)
    grown_right = right.square().sum(-1) - right.shape[-1] * math.sqrt(epsilon)
    gradient = (grown_left.clamp(min=0) * grown_right.clamp(min=0)).sqrt()
    return 2 * radius**2 / eta * distance + eta * gradient + real("gaps", gaps, distance)


def original_shampoo_bound(
    gram: Tensor, column_gram: Tensor, *, radius: float, rank: int
) -> Tensor:
    """Bound the regret of Shampoo by Gupta, Koren and Singer (2018, Theorem 7).

    √(2r)·‖X‖_F·Tr M_T^{1/4}·Tr N_T^{1/4}, with ‖X‖_F = 2D√min(m, n) the diameter of the
    operator-norm ball in the Frobenius norm, r ≥ rank G_t, and their η = ‖X‖_F/√(2r).
    """
    left, right = quarter_roots(gram, column_gram)
    short = min(left.shape[-1], right.shape[-1])
    diameter = 2 * _checks.positive("radius", radius) * math.sqrt(short)
    constant = math.sqrt(2 * _checks.count("rank", rank)) * diameter
    return constant * left.sum(-1) * right.sum(-1)


def quarter_roots(gram: Tensor, column_gram: Tensor, epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of (εI + M)^{1/4} and (εI + N)^{1/4}."""
    left = (spectrum("gram", gram) + epsilon) ** 0.25
    right = (spectrum("column_gram", column_gram) + epsilon) ** 0.25
    _checks.broadcastable("column_gram", right.shape[:-1], "gram", left.shape[:-1])
    return left, right
