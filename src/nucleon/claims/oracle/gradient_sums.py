"""Proposition C.2 and Lemmas C.3 to C.5, both sides, on gradients (T, m, n).

The roots of M_t = ΣG_sG_sᵀ and N_t come from the singular values of [G_1 … G_t], in which no Gram
matrix is formed.
"""

import math

import numpy as np

from nucleon.claims.oracle.algebra import Array, inner, transposed

KEPT = 1e-7
"""Singular values below this share of the largest are rounding."""


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
