"""Theorems of ours on the average of the iterates, which the paper does not have.

W̄_T = Σp_tW_t with p_t ∝ Γ(t+p)/Γ(t), t = 1 … T, has the mean age f(T−1) with f = 1/(p+2); it is
the average of `nucleon.optim.average` with a fraction f. The derivations are in docs/theory.md.
"""

import math

import torch
from torch import Tensor

from nucleon import _checks


def average_weights(fraction: float, rounds: int) -> Tensor:
    """Return the weights p_1 … p_T of the iterates in the average, in float64; f in (0, 0.5]."""
    t = torch.arange(1, _checks.count("rounds", rounds) + 1, dtype=torch.float64)
    return (torch.lgamma(t + _power(fraction)) - torch.lgamma(t)).softmax(0)


def average_distance_bound(fraction: float, rounds: int, radius: float) -> float:
    """Return 2D(T+p)(p+1)/((p+2)(2p+3)) ≥ E Σp_s‖W_s − W̄‖, steps being D long in the mean."""
    p = _power(fraction)
    return 2 * radius * (rounds + p) * (p + 1) / ((p + 2) * (2 * p + 3))


def average_constant_rate_bound(
    power: int, rounds: int, *, rate: float, distance: float, gradient_norm: float
) -> float:
    """Return R²/(2ηT) + (ηG²/2)H_{p+1} ≥ E f(W̄_T) − f* for convex f, at every T of one run.

    `power` is an integer p = 1/f − 2 ≥ 0, `rate` η is the same at every step of (projected) SGD,
    `distance` is R = ‖W_1 − W*‖, and E‖G_t‖² ≤ G² for `gradient_norm` G.
    """
    harmonic = sum(1 / k for k in range(1, _checks.count("power", power, minimum=0) + 2))
    return distance**2 / (2 * rate * rounds) + rate * gradient_norm**2 / 2 * harmonic


def average_falling_rate_bound(
    power: int, rounds: int, *, rate: float, diameter: float, gradient_norm: float
) -> float:
    """Return (d²/(4c) + cG²/2)(2 + Σ_{k≤p} 1/(k+½))/√T ≥ E f(W̄_T) − f*, the rate c/√t.

    `diameter` is d of the set on which SGD projects, `rate` is c, the others are as above.
    """
    steps = range(1, _checks.count("power", power, minimum=0) + 1)
    factor = 2 + sum(1 / (k + 0.5) for k in steps)
    scale = diameter**2 / (4 * rate) + rate * gradient_norm**2 / 2
    return scale * factor / math.sqrt(rounds)


def _power(fraction: float) -> float:
    """Return p = 1/f − 2."""
    if not 0 < fraction <= 0.5:
        raise ValueError(f"fraction must be in (0, 0.5], got {fraction!r}; 0.1 suits most runs")
    return 1 / fraction - 2
