"""Powers and norms of matrices, sums over a history, and a solver for quadratics over a ball."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Project = Callable[[Array], Array]

EPS = float(np.finfo(np.float64).eps)
MOST_STEPS = 20_000


def transposed(a: Array) -> Array:
    """Aᵀ of each matrix."""
    return np.swapaxes(a, -1, -2)


def wide(a: Array) -> Array:
    """Each matrix with its short side first."""
    return a if a.shape[-2] <= a.shape[-1] else transposed(a)


def power(a: Array, exponent: float) -> Array:
    """A^p of a positive semidefinite A; a negative power acts on the range."""
    values, vectors = np.linalg.eigh(a)
    kept = values > a.shape[-1] * EPS * values[..., -1:]
    powers = np.where(kept, np.where(kept, values, 1.0) ** exponent, 0.0)
    return (vectors * powers[..., None, :]) @ transposed(vectors)


def polar(s: Array) -> Array:
    """UVᵀ of S = UΣVᵀ."""
    u, _, vt = np.linalg.svd(s, full_matrices=False)
    return u @ vt


def nuclear(s: Array) -> Array:
    """‖S‖_*."""
    return np.linalg.svd(s, compute_uv=False).sum(-1)


def operator(s: Array) -> Array:
    """‖S‖_op."""
    return np.linalg.svd(s, compute_uv=False)[..., 0]


def trace_root(a: Array) -> Array:
    """Tr √A of a positive semidefinite A."""
    return np.sqrt(np.maximum(np.linalg.eigvalsh(a), 0.0)).sum(-1)


def inner(a: Array, b: Array) -> Array:
    """⟨A, B⟩."""
    return (a * b).sum((-2, -1))


def shifted(s: Array, root: Array, noise: Array) -> Array:
    """[S 0] + LZ of each Z, which may have more columns than S."""
    perturbed = root @ noise
    perturbed[..., : s.shape[-1]] += s
    return perturbed


def discounted(history: Array, discount: float) -> Array:
    """Σ_s γ^{t-s}A_s of a history (t, …)."""
    weights = discount ** np.arange(len(history))[::-1]
    return np.tensordot(weights, history, 1)


def moments(history: Array, discount: float = 1.0) -> tuple[Array, Array]:
    """Ĝ_t = Σγ^{t-s}G_s and M̂_t = Σγ^{2(t-s)}G_sG_sᵀ of a history."""
    grams = history @ transposed(history)
    return discounted(history, discount), discounted(grams, discount**2)


def operator_ball(radius: float) -> Project:
    """The nearest matrix of ‖X‖_op ≤ D: singular values above D become D."""

    def project(x: Array) -> Array:
        u, sigma, vt = np.linalg.svd(x, full_matrices=False)
        return (u * np.minimum(sigma, radius)[..., None, :]) @ vt

    return project


def box(radius: float) -> Project:
    """The nearest point of the ℓ∞ ball."""
    return lambda x: np.clip(x, -radius, radius)


def minimize(linear: Array, bend: Callable[[Array], Array], largest: Any, ball: Project) -> Array:
    """The minimizer of ⟨C, X⟩ + ½⟨X, bend(X)⟩ over a ball, by accelerated projected gradient.

    `largest` is the largest eigenvalue of `bend`, one number or one for each game. It starts at
    0, and momentum anew where it points uphill; it ends when steps move nothing.
    """
    step = 1.0 / np.asarray(largest, dtype=np.float64)[..., None, None]
    x = ahead = np.zeros_like(linear)
    momentum = np.ones((*linear.shape[:-2], 1, 1))
    for _ in range(MOST_STEPS):
        new = ball(ahead - step * (linear + bend(ahead)))
        uphill = inner(ahead - new, new - x)[..., None, None] > 0
        momentum = np.where(uphill, 1.0, momentum)
        grown = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        still = np.abs(new - x).max() + np.abs(new - ahead).max() <= 8 * EPS * np.abs(new).max()
        x, ahead, momentum = new, new + (momentum - 1) / grown * (new - x), grown
        if still:
            break
    return x
