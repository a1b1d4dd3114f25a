"""Lemma 3.1 and the proof of Theorem 3.2: the terms of the regret and the bounds on them.

The discounted game is the plain one on γ^{-t}G_t, whose bound grows as Gγ^{-(t+1)}, times γ^T.
"""

from collections.abc import Callable

import numpy as np

from nucleon.claims.oracle.algebra import (
    Array,
    inner,
    nuclear,
    power,
    shifted,
    trace_root,
    transposed,
)
from nucleon.claims.oracle.bounds import eta
from nucleon.claims.oracle.learners import Direction, Noise, regularized

Value = Callable[[Array, Array], Array]
"""(S, Λ) → Ψ(S; Λ)."""


def hyperbolic_value(s: Array, smoothing: Array) -> Array:
    """Tr √(SSᵀ + Λ)."""
    return trace_root(s @ transposed(s) + smoothing)


def regularized_value(s: Array, smoothing: Array) -> Array:
    """⟨S, X⟩ − ½Tr XᵀLX + ½Tr L at its maximizer, L = Λ^{1/2}."""
    root, x = power(smoothing, 0.5), regularized(s, smoothing)
    return inner(s - root @ x / 2, x) + np.trace(root, axis1=-2, axis2=-1) / 2


def perturbed_value(noise: Noise) -> Value:
    """The mean of ‖[S 0] + LZ‖_* over one Z for all rounds."""
    return lambda s, level: nuclear(shifted(s, np.linalg.cholesky(level), noise(0))).mean(0)


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
    """The four kinds of terms, summed over the rounds, and the bounds that (α, β) put on them."""
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
