"""Curvature learned online by FAML (Appendix A), in the units of the losses ℓ_t.

c = (μ+L)/2 and r = (L−μ)/2: B_t − cI is the action of a game of radius r on ∇ℓ_t(B_t), the
symmetric part of −(y − B_ts)sᵀ/‖s‖², whose norm is at most 2r.
"""

from typing import NamedTuple

import numpy as np

from nucleon.claims.oracle import bounds, learners, unknown
from nucleon.claims.oracle.algebra import Array

Pairs = list[tuple[Array, Array]]
"""(s, y) of each round."""


class CurvatureGame(NamedTuple):
    """B_1 … B_T of FAML, Σℓ_t(B_t), Σ⟨∇ℓ_t(B_t), B_t − B⟩ for the worst B, and its bound."""

    matrices: Array
    loss: float
    regret: float
    bound: float


def loss(pair: tuple[Array, Array], matrix: Array) -> float:
    """ℓ(B) = ‖y − Bs‖²/(2‖s‖²)."""
    s, y = pair
    residual = y - matrix @ s
    return float(residual @ residual / (2 * s @ s))


def play(pairs: Pairs, *, mu: float, L: float, running: bool) -> CurvatureGame:
    """FAML with 2r for the bound on ∇ℓ_t, or the largest norm so far where it is `running`."""
    n, half = len(pairs[0][0]), (L - mu) / 2
    center, level = (mu + L) / 2 * np.eye(n), None if running else 2 * half
    gradients, actions, paid = np.zeros((0, n, n)), list[Array](), 0.0
    for s, y in pairs:
        history = np.concatenate([gradients, np.zeros((1, n, n))])
        x = learners.gbpa(learners.augmented, history, radius=half, bound=level)[-1]
        actions.append((x + x.T) / 2)
        matrix = center + actions[-1]
        slope = -np.outer(y - matrix @ s, s) / (s @ s)
        gradients = np.concatenate([gradients, (slope + slope.T)[None] / 2])
        paid += loss((s, y), matrix)
    played = np.stack(actions)
    if running:
        bound = unknown.gbpa_bound(gradients, bounds.HYPERBOLIC, clip=False, radius=half)
    else:
        bound = bounds.gbpa(gradients, bounds.HYPERBOLIC, radius=half, bound=2 * half)
    regret = learners.regret(gradients, played, radius=half)
    return CurvatureGame(center + played, paid, float(regret), float(bound))
