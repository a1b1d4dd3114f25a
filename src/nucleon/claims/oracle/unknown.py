"""Without a bound on the gradients: Remark B.1 for AdaGrad-FTRL, and for the GBPA.

The bound in force is the largest norm of the rounds before. The part E_t of a gradient above it is
fed or cut off, and costs 2D‖E_t‖. The first gradient answers X_1 = 0, and costs nothing more.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from nucleon.claims.oracle import bounds, learners
from nucleon.claims.oracle.algebra import Array, discounted, minimize
from nucleon.claims.oracle.learners import Ball

Offset = Literal["scale-free", "clip", "proximal"]
Preconditioner = Literal["scalar", "diagonal"]
ETA: dict[Offset, float] = {"scale-free": 2**-0.75, "clip": 2**-0.5, "proximal": 2**0.5}
"""η over D_p."""


class Fed(NamedTuple):
    """A history as it is fed under the bound in force."""

    gradients: Array
    levels: Array
    """The bound in force after each round, (T, …)."""
    excess: Array
    """‖E_t‖ above the one before, (T, …)."""


# ---------------------------------------------------------------------- AdaGrad-FTRL


def adagrad(
    gradients: Array, *, offset: Offset, preconditioner: Preconditioner, ball: Ball, radius: float
) -> Array:
    """FTRL on rows: argmin ⟨s_t, x⟩ + ‖x‖²_{H_t}/2η, proximal with Σ‖x − x_s‖²_{H_s−H_{s-1}}/2η."""
    fed = _fed(gradients, offset, preconditioner)
    eta = ETA[offset] * learners.reaches(gradients.shape[-1], preconditioner, ball, radius)[0]
    roots = np.sqrt(_squares(fed.gradients, preconditioner).cumsum(0))
    weights = (roots + fed.levels[..., None, None]) / eta
    grown = np.diff(weights, axis=0, prepend=np.zeros_like(weights[:1]))
    project = learners.within(ball, radius)

    def action(history: Array, actions: list[Array]) -> Array:
        weight, linear = weights[len(history) - 1], history.sum(0)
        if offset == "proximal":
            linear = linear - (grown[: len(history)] * np.stack(actions)).sum(0)
        return minimize(linear, lambda x: weight * x, weight.max((-2, -1)), project)

    return learners.played(action, fed.gradients)


def adagrad_bound(
    gradients: Array, *, offset: Offset, preconditioner: Preconditioner, ball: Ball, radius: float
) -> Array:
    """δ = 0: (R²/2η + √2η)Tr H + (2+√2)·2R·peak; clipped: (R²/2η + η)Tr H + δR₂²/2η + 2R·Σ‖e_t‖;
    proximal: ((2R)²/2η + η)Tr H; R the reach in the preconditioner's norm, R₂ in ℓ2.
    """
    fed = _fed(gradients, offset, preconditioner)
    reach, euclidean = learners.reaches(gradients.shape[-1], preconditioner, ball, radius)
    eta = ETA[offset] * reach
    roots = np.sqrt(_squares(fed.gradients, preconditioner).sum(0))
    trace = roots.sum((-2, -1))
    if offset == "proximal":
        return (2 * reach**2 / eta + eta) * trace
    if offset == "clip":
        paid = fed.levels[-1] * euclidean**2 / (2 * eta) + 2 * reach * fed.excess.sum(0)
        return (reach**2 / (2 * eta) + eta) * trace + paid
    peak = np.sqrt(_squares(gradients, preconditioner)).max(0).sum((-2, -1))
    leading = (reach**2 / (2 * eta) + math.sqrt(2) * eta) * trace
    return leading + (2 + math.sqrt(2)) * 2 * reach * peak


def _fed(gradients: Array, offset: Offset, preconditioner: Preconditioner) -> Fed:
    none = np.zeros(gradients.shape[:-2])
    if offset != "clip":
        return Fed(gradients, none, none)
    sizes = np.sqrt(_squares(gradients, preconditioner))
    levels = np.maximum.accumulate(sizes.max((-2, -1)), 0)
    limit = _before(levels)[..., None, None]
    cut = gradients * np.minimum(1.0, limit / np.maximum(sizes, np.finfo(np.float64).tiny))
    return Fed(cut, levels, np.maximum(sizes - limit, 0.0).sum((-2, -1)))


def _squares(gradients: Array, preconditioner: Preconditioner) -> Array:
    """g_i² for "diagonal", else ‖g‖², (…, 1, d or 1)."""
    squares = gradients**2
    return squares if preconditioner == "diagonal" else squares.sum(-1, keepdims=True)


# ---------------------------------------------------------------------- the GBPA


def gbpa(
    direction: learners.Direction,
    gradients: Array,
    *,
    clip: bool,
    bound: float | None = None,
    **game: float,
) -> Array:
    """The GBPA on what is left of the gradients, with the bound in force for G."""
    fed = fed_matrices(gradients, clip=clip, bound=bound)
    return learners.gbpa(direction, fed.gradients, bound=fed.levels, **game)


def gbpa_bound(
    gradients: Array,
    constants: tuple[float, float],
    *,
    clip: bool,
    bound: float | None = None,
    radius: float = 1.0,
    discount: float = 1.0,
) -> Array:
    """Theorem 3.2 with the last bound in force, and 2D·Σγ^{T-t}‖E_t‖_*."""
    fed = fed_matrices(gradients, clip=clip, bound=bound)
    game = {"radius": radius, "discount": discount}
    theorem = bounds.gbpa(fed.gradients, constants, bound=fed.levels[-1], **game)
    return theorem + 2 * radius * discounted(fed.excess, discount)


def fed_matrices(gradients: Array, *, clip: bool, bound: float | None) -> Fed:
    """Singular values above the bound in force are cut off, or make it grow.

    A stated bound that clips stays as it is; one that grows is where the largest norm starts.
    """
    u, sigma, vt = np.linalg.svd(gradients, full_matrices=False)
    levels = np.maximum(np.maximum.accumulate(sigma[..., 0], 0), 0.0 if bound is None else bound)
    limit = _before(levels)
    if clip and bound is not None:
        levels = limit = np.full_like(levels, bound)
    over = np.maximum(sigma - limit[..., None], 0.0)
    cut = (u * (sigma - over)[..., None, :]) @ vt if clip else gradients
    return Fed(cut, levels, over.sum(-1))


def _before(levels: Array) -> Array:
    """The bound in force before each round, none before the first."""
    return np.concatenate([np.full_like(levels[:1], np.inf), levels[:-1]])
