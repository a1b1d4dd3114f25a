"""‖∇L(W)‖^[ρ] at a point: how small an average of gradients around W can be made (Definition 5.1).

    ‖∇L(W)‖^[ρ] = inf ‖E ∇L(Y)‖_*  over laws of Y with E Y = W and E‖Y − W‖_op ≤ ρ

A law on sampled points W + Δ_i has the weights p_i of a convex program,

    min ‖g + Σ p_i (g_i − g)‖_*,  p ≥ 0,  Σ p_i ≤ 1,  Σ p_iΔ_i = 0,  Σ p_i‖Δ_i‖_op ≤ ρ,

g_i the gradient at W + Δ_i and g that at W, which has the remaining weight. docs/theory.md, "The
gap at a point", says how points are drawn and how the mean is balanced.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.linalg.polar import polar
from nucleon.linalg.projections import truncated

Gradient = Callable[[Tensor], Tensor]
"""∇L of a stack of points: (k, m, n) → (k, m, n)."""

_NOISE_SEED = 0x737461746E
_GENERATIONS = 16
_ITERATIONS = 250  # of the weights' program in each generation
_LAST = 2000  # and in the last
_RATIO = 10.0  # √ of the ratio of its steps in p and in the prices: best of 1, 3, 5, 10 on kinks
_REACH = 3.0  # decades of ‖Δ‖/ρ, from 1/5 up; far points get a small weight
_LOPSIDED = 2.0  # decades of c, from 1/100 to 100


@dataclass(frozen=True, eq=False)
class StationarityGap:
    """An upper bound of ‖∇L(W)‖^[ρ], with the law that reaches it."""

    value: float
    """‖E ∇L(Y)‖_*."""
    gap: float
    """Duality gap of the last program: by the gradients that the search sampled, no law on its
    points has a value smaller than that of `weights` by more."""
    distance: float
    """E‖Y − W‖_op, at most ρ."""
    offsets: Tensor
    """Y − W where it is not 0, (k, m, n)."""
    weights: Tensor
    """Probabilities of the offsets, (k,); Y = W with the rest."""
    at_the_point: float
    """‖∇L(W)‖_*, the value with ρ = 0."""


def stationarity_gap(
    gradient: Gradient, w: Tensor, *, rho: float, pairs: int = 96, seed: int = 0
) -> StationarityGap:
    """Return an upper bound of ‖∇L(W)‖^[ρ] (Definition 5.1), with the law that reaches it.

    Args:
        gradient: ∇L of a stack of points. The search minimizes over what it returns, so the noise
            of a stochastic gradient would make the value too small.
        w: the point W, (m, n), float32 or float64.
        rho: ρ > 0.
        pairs: new points W + Δ, W − cΔ in each generation of the search (default 96).
        seed: of the points (default 0); the least value over several seeds is a bound as well.
    """
    if _checks.matrix("w", w, dtypes=_checks.FULL_DTYPES).ndim != 2:
        raise ValueError(f"w must be one matrix (m, n), got shape {tuple(w.shape)}; pass one point")
    rho = _checks.positive("rho", rho)

    def sampled(offsets: Tensor) -> Tensor:
        """Return the gradient at W + Δ, (k, m, n), in float64."""
        points = w + offsets
        gradients = gradient(points)
        if gradients.shape != points.shape:
            raise ValueError(
                f"gradient must map (k, m, n) to (k, m, n), gave {tuple(gradients.shape)} for "
                f"{tuple(points.shape)}"
            )
        return _checks.finite("the gradient around w", gradients).double()

    here = sampled(torch.zeros_like(w).unsqueeze(0))[0]
    offsets, gradients = w.new_zeros(0, *w.shape), here.new_zeros(0, *w.shape)
    program = Average(here.new_zeros(0), here.new_zeros(2 * here.numel() + 2), 0.0)
    for generation in range(1, _GENERATIONS + 1):
        heavy = program.weights > 1e-6 * program.weights.sum()
        offsets, gradients, weights = offsets[heavy], gradients[heavy], program.weights[heavy]
        fresh = _proposals(offsets, weights, w, here, rho, pairs, seed, generation)
        offsets = torch.cat([offsets, fresh])
        gradients = torch.cat([gradients, sampled(fresh)])
        start = program._replace(weights=torch.cat([weights, weights.new_zeros(len(fresh))]))
        count = _LAST if generation == _GENERATIONS else _ITERATIONS
        program = least_average(here, gradients, offsets.double() / rho, start, iterations=count)
    positive = program.weights > 0
    offsets, weights, distance = _balanced(offsets[positive], program.weights[positive], rho)
    points = torch.cat([torch.zeros_like(w).unsqueeze(0), offsets])
    p = torch.cat([1 - weights.sum().reshape(1), weights])
    value = nuclear_norm(torch.einsum("k,kmn->mn", p, sampled(points))).item()
    return StationarityGap(
        value=value,
        gap=max(0.0, value - program.lower),
        distance=distance,
        offsets=offsets,
        weights=weights,
        at_the_point=nuclear_norm(here).item(),
    )


class Average(NamedTuple):
    """An average of gradients, nearly the least of its program."""

    weights: Tensor
    """p, (k,), with Σp_i + ‖Σp_iΔ_i‖ ≤ 1 and Σp_i‖Δ_i‖ + ‖Σp_iΔ_i‖ ≤ 1: room to balance it."""
    prices: Tensor
    """X, a, b and Y of the saddle point, (2mn + 2,)."""
    lower: float
    """A lower bound of the program, from a point of its dual."""


def least_average(
    here: Tensor, gradients: Tensor, offsets: Tensor, start: Average, *, iterations: int
) -> Average:
    """Minimize ‖g + Σp_i(g_i − g)‖_* over p ≥ 0 with Σp_i ≤ 1, Σp_i‖Δ_i‖_op ≤ 1 and Σp_iΔ_i = 0.

    The primal-dual method of Chambolle and Pock (2011) on the saddle point over p ≥ 0, ‖X‖_op ≤ 1,
    prices a, b ≥ 0 of the two budgets and a free price Y of the mean. Every 50 iterations it starts
    again from its average, where that has the smaller duality gap.
    The lower bound is the dual function at ‖X‖_op ≤ 1, b ≥ 0 and Y,

        ⟨X, g⟩ − b + min(0, min_i ⟨X, g_i − g⟩ + b‖Δ_i‖_op + ⟨Y, Δ_i⟩).

    `here` is g, (m, n), and `offsets` are Δ_i in units of the radius, (k, m, n); all are float64.
    """
    cells, changes, lengths = here.numel(), gradients - here, operator_norm(offsets)
    size = nuclear_norm(changes).amax().clamp(min=1e-300).item()
    # In units of the largest weight that its length allows, all points are of one size.
    unit = 1 / lengths.clamp(min=1.0)
    budgets = torch.stack([torch.ones_like(lengths), lengths], 1)
    matrix = torch.cat([changes.flatten(1) / size, budgets, offsets.flatten(1)], 1) * unit[:, None]
    constant = torch.cat([here.flatten() / size, -here.new_ones(2), here.new_zeros(cells)])
    step = 0.99 / torch.linalg.matrix_norm(matrix, 2).item()

    def feasible(q: Tensor) -> tuple[float, Tensor]:
        sums = q @ matrix
        left = torch.linalg.matrix_norm(sums[cells + 2 :].reshape(here.shape), 2)
        share = 1 / (sums[cells : cells + 2] + left).amax().clamp(min=1 + 1e-12)
        average = (constant[:cells] + share * sums[:cells]).reshape(here.shape)
        return (torch.linalg.svdvals(average).sum() + share * left).item(), share * q

    def bound(dual: Tensor) -> float:
        reduced = (matrix @ dual / unit - dual[cells]).amin().clamp(max=0)
        return (reduced + constant @ dual + dual[cells]).item()

    def projected(dual: Tensor) -> Tensor:
        x = truncated(dual[:cells].reshape(here.shape), 1.0).flatten()
        return torch.cat([x, dual[cells : cells + 2].clamp(min=0), dual[cells + 2 :]])

    q = start.weights / unit
    dual = torch.cat([start.prices[:cells], start.prices[cells:] / size])
    best, lower = feasible(q), 0.0
    sums, terms = [torch.zeros_like(q), torch.zeros_like(dual)], 0
    for iteration in range(1, iterations + 1):
        moved = (q - _RATIO * step * (matrix @ dual)).clamp(min=0)
        dual = projected(dual + step / _RATIO * ((2 * moved - q) @ matrix + constant))
        q, terms = moved, terms + 1
        sums = [sums[0] + q, sums[1] + dual]
        if terms < 50 and iteration < iterations:
            continue
        visited = [(q, dual), (sums[0] / terms, sums[1] / terms)]
        ends = [(feasible(q), bound(dual)) for q, dual in visited]
        best = min(best, *(end[0] for end in ends), key=lambda pair: pair[0])
        lower = max(lower, *(end[1] for end in ends))
        gaps = [end[0][0] - end[1] for end in ends]
        q, dual = visited[gaps.index(min(gaps))]
        sums, terms = [torch.zeros_like(q), torch.zeros_like(dual)], 0
    prices = torch.cat([dual[:cells], dual[cells:] * size])
    return Average(best[1] * unit, prices, size * lower)


def _proposals(
    offsets: Tensor,
    weights: Tensor,
    w: Tensor,
    slope: Tensor,
    rho: float,
    pairs: int,
    seed: int,
    generation: int,
) -> Tensor:
    """Return new offsets Δ and −cΔ: half near those that have weight, half of any kind.

    Every other one of the latter is along W or along the steepest direction, where kinks are met
    head on.
    """
    key: dict[str, Any] = {"seed": seed ^ _NOISE_SEED, "step": generation}
    key |= {"dtype": w.dtype, "device": w.device}
    normal = noise.normal((pairs, *w.shape), stream=0, **key)
    uniform = noise.uniform((4, pairs), stream=1, **key)
    direction = normal / operator_norm(normal)[:, None, None]
    ahead = torch.stack([w / operator_norm(w).clamp(min=1e-30), polar(slope.to(w.dtype))])
    ahead = torch.cat([ahead, -ahead])
    direction[::4] = ahead[torch.arange(len(direction[::4]), device=w.device) % 4]
    length = rho * 10 ** (_REACH * uniform[0] - _REACH / 4)
    fresh = direction * length[:, None, None]
    if len(weights):
        generator = torch.Generator().manual_seed(seed + generation)
        shares = (weights * operator_norm(offsets)).cpu()
        chosen = torch.multinomial(shares, pairs, replacement=True, generator=generator)
        parents = offsets[chosen.to(w.device)]
        spread = 10 ** (-4 * uniform[1])
        stretch = 1 + (2 * uniform[2] - 1) * spread
        turn = (operator_norm(parents) * spread)[:, None, None] * normal / math.sqrt(w.numel())
        turn[1::4] = 0  # half of them only change in length
        fresh[1::2] = (stretch[:, None, None] * parents + turn)[1::2]
    ratios = 10 ** (_LOPSIDED * (2 * uniform[3] - 1))
    ratios[::3] = 1.0
    return torch.cat([fresh, -ratios[:, None, None] * fresh])


def _balanced(offsets: Tensor, weights: Tensor, rho: float) -> tuple[Tensor, Tensor, float]:
    """Return a law with mean W, by one more point at distance ρ, and its mean distance ≤ ρ."""
    left = torch.einsum("k,kmn->mn", weights, offsets.double())
    size = operator_norm(left)
    if size > 0:
        offsets = torch.cat([offsets, (-rho / size * left).to(offsets.dtype).unsqueeze(0)])
        weights = torch.cat([weights, (size / rho).reshape(1)])
    lengths = operator_norm(offsets).double()
    while (distance := (weights * lengths).sum().item()) > rho:  # by rounding
        weights = weights * (rho / distance * (1 - 1e-15))
    return offsets, weights, distance
