"""The terms that k samples of FTPL add to the regret of its mean actions, but with probability δ.

X_1 = 0 is not drawn, so the first gradient costs nothing; in the discounted game ‖G_t‖_* counts
γ^{T-t} times. Several games share δ equally.
"""

import math

import numpy as np

from nucleon.claims.oracle.algebra import Array, nuclear


def oblivious(
    gradients: Array,
    *,
    radius: float,
    samples: int,
    delta: float,
    discount: float = 1.0,
    redraw: bool = True,
) -> Array:
    """D√(2 log(1/δ)·Σ‖G_t‖_*²/k) (Hoeffding); with one Z for the game D√(2 log(1/δ)/k)·Σ‖G_t‖_*."""
    norms = _norms(gradients, discount)
    size = np.sqrt((norms**2).sum(0)) if redraw else norms.sum(0)
    return radius * math.sqrt(-2 * math.log(delta / _games(gradients)) / samples) * size


def adaptive(
    gradients: Array, *, radius: float, samples: int, delta: float, discount: float = 1.0
) -> Array:
    """D·ε·Σ‖G_t‖_*, ε of the matrix Bernstein inequality with δ/T for every round."""
    sides, rounds = sum(gradients.shape[-2:]), len(gradients)
    log = math.log(sides * rounds * _games(gradients) / delta)
    return radius * bernstein(log, samples) * _norms(gradients, discount).sum(0)


def bernstein(log: float, samples: int) -> float:
    """The ε ≤ 2 at which kε²/2/(1 + 2ε/3) passes ℓ, by bisection."""
    low, high = 0.0, 2.0
    for _ in range(80):
        middle = (low + high) / 2
        if samples * middle**2 / 2 / (1 + 2 * middle / 3) < log:
            low = middle
        else:
            high = middle
    return high


def _norms(gradients: Array, discount: float) -> Array:
    ages = np.arange(len(gradients))[::-1].reshape(-1, *(1 for _ in gradients.shape[1:-2]))
    return (discount**ages * nuclear(gradients))[1:]


def _games(gradients: Array) -> int:
    return math.prod(gradients.shape[1:-2])
