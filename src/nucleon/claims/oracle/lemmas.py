"""The terms of Lemma 3.1, and the lemmas of Appendices C and E, both sides."""

import math

import numpy as np

from nucleon.claims.oracle.algebra import Array, inner, nuclear, power, trace_root, transposed
from nucleon.claims.oracle.bounds import eta
from nucleon.claims.oracle.learners import Direction
from nucleon.claims.oracle.smoothings import Value

KEPT = 1e-7
"""Singular values below this share of the largest are rounding."""
PANELS = 4000
"""Panels of the quadrature in v, where e^{−λ(1−v²)/2} needs λ/panels < 1."""
ANGLES = 40
"""Panels of the quadrature over the angle, whose integrand is smooth."""


# ---------------------------------------------------------------------- Lemma 3.1


def terms(
    value: Value,
    slope: Direction,
    gradients: Array,
    constants: tuple[float, float],
    *,
    radius: float,
    bound: float,
    discount: float,
) -> dict[str, Array]:
    """The four kinds of terms, summed over the rounds, and the bounds that (α, β) put on them.

    The discounted game is the plain one on γ^{-t}G_t, whose bound grows as Gγ^{-(t+1)}, times γ^T.
    """
    rounds = len(gradients)
    (alpha, beta), unit = constants, np.eye(gradients.shape[-2])
    ages = np.arange(1, rounds + 1).reshape(-1, *(1 for _ in gradients.shape[1:]))
    plain = gradients * discount ** -ages.astype(np.float64)
    totals = plain.cumsum(0)
    grown = (bound * discount ** -(ages + 1.0)) ** 2 * unit
    levels = (grown + (plain @ transposed(plain)).cumsum(0)) / eta(constants) ** 2

    ends = {
        "underestimation": nuclear(totals[-1]) - value(totals[-1], levels[-1]),
        "first_round": value(totals[0], levels[0]),
        "first_round_bound": nuclear(totals[0]) + alpha * trace_root(levels[0]),
        "stability_bound": alpha * (trace_root(levels[-1]) - trace_root(levels[0])),
    }
    sums = {name: np.zeros(gradients.shape[1:-2]) for name in ("bregman", "stability")}
    sums["bregman_bound"] = np.zeros(gradients.shape[1:-2])
    for t in range(1, rounds):
        g, before, after = plain[t], levels[t - 1], levels[t]
        step = inner(slope(totals[t - 1], before, 0), g)
        sums["bregman"] += value(totals[t], before) - value(totals[t - 1], before) - step
        sums["stability"] += value(totals[t], after) - value(totals[t], before)
        sums["bregman_bound"] += beta / 2 * inner(g, power(before, -0.5) @ g)
    return {name: radius * discount**rounds * v for name, v in {**ends, **sums}.items()}


# ---------------------------------------------------------------------- Appendix C
# On gradients (T, m, n). The roots of M_t = ΣG_sG_sᵀ and N_t come from the singular values of
# [G_1 … G_t], in which no Gram matrix is formed.


def matrix_potential(gradients: Array) -> tuple[float, float]:
    """ΣTr(G_tᵀM_t^{-1/2}G_t) and 2Tr√M_T (C.3)."""
    left = 0.0
    for t in range(1, len(gradients) + 1):
        u, sigma = _stacked(gradients[:t])
        left += float((((u.T @ gradients[t - 1]) ** 2).sum(-1) / sigma).sum())
    return left, 2 * float(_stacked(gradients)[1].sum())


def gradient_term(gradients: Array) -> tuple[float, float]:
    """ΣTr(G_tᵀM_t^{-1/4}G_tN_t^{-1/4}) and 2√(Tr M_T^{1/2}·Tr N_T^{1/2}) (C.4)."""
    left, flipped = 0.0, transposed(gradients)
    for t in range(1, len(gradients) + 1):
        (u, sigma), (v, tau) = _stacked(gradients[:t]), _stacked(flipped[:t])
        left += float(((u.T @ gradients[t - 1] @ v) ** 2 / np.sqrt(np.outer(sigma, tau))).sum())
    rows, columns = _stacked(gradients)[1].sum(), _stacked(flipped)[1].sum()
    return left, 2 * math.sqrt(rows * columns)


def distance_term(
    gradients: Array, actions: Array, comparator: Array, *, radius: float
) -> tuple[float, float]:
    """The drift of Shampoo's distances and 4D²(‖L_T‖_op Tr R_T + Tr L_T ‖R_T‖_op) (C.5)."""
    roots = [_quarters(gradients[:t]) for t in range(1, len(gradients) + 1)]
    lefts, rights = (np.stack(side) for side in zip(*roots, strict=True))
    rows, columns = (np.sqrt(_stacked(g)[1]) for g in (gradients, transposed(gradients)))
    bound = rows.max() * columns.sum() + rows.sum() * columns.max()
    return drift(actions - comparator, lefts, rights), 4 * radius**2 * float(bound)


def mirror_descent(
    gradients: Array, actions: Array, comparator: Array, left: Array, right: Array, *, eta: float
) -> tuple[float, float]:
    """Σ⟨G_t, X_t − X⟩ and drift/(2η) + η/2·ΣTr(G_tᵀL_t⁻¹G_tR_t⁻¹), L_t, R_t ≻ 0 (C.2)."""
    away = actions - comparator
    weighted = np.linalg.solve(left, transposed(np.linalg.solve(right, transposed(gradients))))
    energy = float(inner(gradients, weighted).sum())
    regret = float(inner(gradients, away).sum())
    return regret, drift(away, left, right) / (2 * eta) + eta / 2 * energy


def drift(away: Array, left: Array, right: Array) -> float:
    """d_1(Y_1) + Σ_{t≥2} [d_t(Y_t) − d_{t-1}(Y_t)], d_t(Y) = Tr(YᵀL_tYR_t)."""
    total = 0.0
    for t, y in enumerate(away):
        total += float(inner(y, left[t] @ y @ right[t]))
        if t:
            total -= float(inner(y, left[t - 1] @ y @ right[t - 1]))
    return total


def _quarters(gradients: Array) -> tuple[Array, Array]:
    """M^{1/4} and N^{1/4}."""
    pairs = (_stacked(gradients), _stacked(transposed(gradients)))
    left, right = ((u * np.sqrt(sigma)) @ u.T for u, sigma in pairs)
    return left, right


def _stacked(gradients: Array) -> tuple[Array, Array]:
    """Left singular vectors and singular values of [G_1 … G_t], those that are not rounding."""
    u, sigma, _ = np.linalg.svd(np.concatenate(list(gradients), -1), full_matrices=False)
    kept = sigma > KEPT * sigma[0]
    return u[:, kept], sigma[kept]


# ---------------------------------------------------------------------- Appendix E, by differences


def hessian(x: Array, direction: Array, step: float = 1e-3) -> float:
    """∇²‖X‖_*[D, D] by a fourth-order second difference."""
    points = np.arange(-2, 3)[:, None, None]
    weights = np.array([-1.0, 16.0, -30.0, 16.0, -1.0])
    return float(weights @ nuclear(x + points * step * direction) / (12 * step**2))


def hessian_bound(x: Array, direction: Array) -> float:
    """Tr Dᵀ(XXᵀ)^{-1/2}D."""
    return float(inner(direction, power(x @ transposed(x), -0.5) @ direction))


def inverse_moment(degrees: int, noncentrality: float) -> float:
    """E[1/χ²_k(λ)] = ∫_0^1 v^{k−3}·exp(−λ(1−v²)/2) dv, from the moment generating function."""
    v, weights = _legendre(PANELS)
    return float(weights @ (v ** (degrees - 3) * np.exp(-noncentrality * (1 - v**2) / 2)))


def shifted_entry(m: int, n: int, shift: float) -> float:
    """E[(((Z+Y)(Z+Y)ᵀ)⁻¹)_11] for Y = σe_1e_1ᵀ: E.2 at k = n−m+1 in the mean over λ = σ²B.

    B ~ Beta((n−m+1)/2, (m−1)/2) is the share of e_1 that the other rows leave. With B = sin²θ its
    law is sin^{n−m}θ·cos^{m−2}θ dθ, smooth for m ≥ 2.
    """
    if m == 1:
        return inverse_moment(n, shift**2)
    v, weights = _legendre(ANGLES)
    theta = v * math.pi / 2
    law = np.sin(theta) ** (n - m) * np.cos(theta) ** (m - 2) * weights
    moments = [inverse_moment(n - m + 1, shift**2 * b) for b in np.sin(theta) ** 2]
    return float(law @ np.array(moments) / law.sum())


def largest_inverse(shift: Array, noise: Array) -> float:
    """λ_max of the mean of ((Z+Y)(Z+Y)ᵀ)⁻¹ over the given Z, from singular vectors of Z+Y."""
    u, sigma, _ = np.linalg.svd(noise + shift, full_matrices=False)
    mean = ((u / sigma[..., None, :] ** 2) @ transposed(u)).mean(0)
    return float(np.linalg.eigvalsh(mean)[-1])


def _legendre(panels: int) -> tuple[Array, Array]:
    """Nodes and weights on [0, 1]: five-point Gauss–Legendre on equal panels."""
    nodes, weights = np.polynomial.legendre.leggauss(5)
    half = 0.5 / panels
    centers = (np.arange(panels) + 0.5) / panels
    return (centers[:, None] + half * nodes).ravel(), np.tile(half * weights, panels)
