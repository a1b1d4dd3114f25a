"""‖∇L(W)‖^[ρ] at a point: how small an average of gradients around W can be made (Definition 5.1).

    ‖∇L(W)‖^[ρ] = inf ‖E ∇L(Y)‖_*  over laws of Y with E Y = W and E‖Y − W‖_op ≤ ρ

The infimum is approached from above by laws on pairs W + Δ_i, W − c_iΔ_i with the chances c_i : 1,
which keep the mean whatever their weights p_i are; for 1×1 there are no others. For given pairs the
weights solve a convex program,

    min ‖Σ p_i ḡ_i‖_*,  p ≥ 0,  Σ p_i = 1,  Σ p_i ℓ_i ≤ ρ,

ḡ_i the mean gradient over the pair and ℓ_i = 2c_i/(1+c_i)·‖Δ_i‖_op its mean distance, and new pairs
are drawn around those that have weight. Any law is a proof: what is returned is an upper bound of
the infimum, and says itself which law reaches it.

Of a stochastic gradient with k draws, ‖ḡ − E g‖_* is compared with ‖Σ_j z_j(g_j − ḡ)‖_*/√(k(k−1)u),
z normal and u an independent χ²_{k−1}/(k−1): of one entry that is Student's t. For normal draws in
one direction the margin covers exactly at its confidence from two draws on; in more directions it
covers at least as often wherever it was simulated (`tests/online/test_stationarity.py`).
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
"""∇L, or a stochastic gradient, of a stack of points: (k, m, n) → (k, m, n)."""

_NOISE_SEED = 0x737461746E
_GENERATIONS = 16
_ITERATIONS = 250  # of the weights' program in each generation
_REACH = 3.0  # decades of ‖Δ‖/ρ, from 1/5 up; far pairs get a small weight
_LOPSIDED = 2.0  # decades of c, from 1/100 to 100
_RESAMPLES = 999  # of the margin: no quantile above 0.999 is among them


@dataclass(frozen=True, eq=False)
class StationarityGap:
    """An upper bound of ‖∇L(W)‖^[ρ], with the law that reaches it."""

    value: float
    """‖E ∇L(Y)‖_*; of a stochastic gradient, that of a mean over draws the search has not seen."""
    margin: float
    """‖E ∇L(Y)‖_* is within value ± margin at the stated confidence, where the mean gradient over
    the law is normal; 0 for an exact gradient."""
    distance: float
    """E‖Y − W‖_op, at most ρ."""
    offsets: Tensor
    """Y − W where it is not 0, (k, m, n)."""
    weights: Tensor
    """The probabilities of these, (k,); Y = W with what is left."""
    at_the_point: float
    """‖∇L(W)‖_*, the value with ρ = 0; of a stochastic gradient, that of the mean of the draws."""

    @property
    def interval(self) -> tuple[float, float]:
        """The interval value ± margin, cut at 0."""
        return max(0.0, self.value - self.margin), self.value + self.margin


def stationarity_gap(
    gradient: Gradient,
    w: Tensor,
    *,
    rho: float,
    pairs: int = 96,
    draws: int | None = None,
    confidence: float = 0.99,
    seed: int = 0,
) -> StationarityGap:
    """The smallest ‖E ∇L(Y)‖_* found over laws with mean W and mean distance ≤ ρ (Definition 5.1).

    Args:
        gradient: ∇L of a stack of points; with `draws`, a stochastic gradient, unbiased and with
            new noise for every point of the stack, which then holds each point so many times.
        w: the point W, (m, n), float32 or float64.
        rho: ρ > 0.
        pairs: new pairs W ± Δ of each generation of the search (default 96).
        draws: of the stochastic gradient at each point, at least 2; None for an exact one
            (default). Few of them leave a wide margin, which is Student's t; noise that is rare and
            large needs so many that it shows.
        confidence: of the margin, from 0.5 to 0.999 (default 0.99).
        seed: of the pairs and the margin (default 0); the least value over several seeds is a
            bound as well.
    """
    if _checks.matrix("w", w, dtypes=_checks.FULL_DTYPES).ndim != 2:
        raise ValueError(f"w must be one matrix (m, n), got shape {tuple(w.shape)}; pass one point")
    rho = _checks.positive("rho", rho)
    _checks.count("pairs", pairs)
    if draws is not None:
        _checks.count("draws", draws, minimum=2)
    if not 0.5 <= _checks.fraction("confidence", confidence) <= 1 - 1 / (_RESAMPLES + 1):
        raise ValueError(
            f"confidence must be from 0.5 to {1 - 1 / (_RESAMPLES + 1):g}, which {_RESAMPLES} "
            f"resamples can tell, got {confidence!r}; pass for example 0.99"
        )
    around = _Around(gradient, w, 1 if draws is None else draws)
    here = around.samples(torch.zeros_like(w).unsqueeze(0)).mean(0)[0]
    found = _Pairs.none(w)
    means = found.offsets.double()
    weights = torch.zeros(0, dtype=torch.float64, device=w.device)
    for generation in range(_GENERATIONS):
        fresh = _proposals(found, weights, w, here, rho, pairs, seed, generation)
        found = found.joined(fresh)
        means = torch.cat([means, around.means(fresh)])
        start = torch.cat([weights, weights.new_zeros(pairs)])
        weights = minimal_average(here, means, found.lengths() / rho, start)
        kept = weights > 1e-6 * weights.sum()
        found, means, weights = found.at(kept), means[kept], weights[kept]
    offsets, probabilities, distance = _within(rho, *found.law(weights))
    samples = around.averages(offsets, probabilities)  # (draws, m, n), fresh ones
    mean = samples.mean(0)
    margin = 0.0 if draws is None else _margin(samples - mean, confidence, seed)
    return StationarityGap(
        value=nuclear_norm(mean).item(),
        margin=margin,
        distance=distance,
        offsets=offsets,
        weights=probabilities,
        at_the_point=nuclear_norm(here).item(),
    )


def minimal_average(
    here: Tensor,
    means: Tensor,
    lengths: Tensor,
    start: Tensor | None = None,
    *,
    iterations: int = _ITERATIONS,
) -> Tensor:
    """Weights p of min ‖g + Σp_i(ḡ_i − g)‖_* over p ≥ 0, Σp_i ≤ 1 and Σp_i·length_i ≤ 1.

    The primal-dual method of Chambolle and Pock (2011) on the saddle point over p ≥ 0, ‖X‖_op ≤ 1
    and the prices ≥ 0 of the two budgets, restarted from its averages; of what it visits, scaled
    into the budgets, the best is returned.

    Args:
        here: g = ∇L(W), (m, n), float64, which has the weight that is left.
        means: ḡ, (k, m, n).
        lengths: ℓ_i/ρ, (k,).
        start: weights to start from (default 0).
        iterations: of the method (default 250).
    """
    # In units of the largest weight that its length allows, all pairs are of one size.
    unit = 1 / lengths.clamp(min=1.0)
    changes = (means - here) * unit[:, None, None]
    size = torch.linalg.matrix_norm(changes).amax().clamp(min=1e-300)
    budgets = torch.stack([unit, unit * lengths], 1)
    matrix = torch.cat([changes.flatten(1), size * budgets], 1)  # (k, mn + 2)
    step = 0.99 / torch.linalg.matrix_norm(matrix, 2)

    def feasible(q: Tensor) -> tuple[Tensor, float]:
        q = q / (q @ budgets).amax().clamp(min=1 + 1e-12)
        average = here + (q[:, None, None] * changes).sum(0)
        return q, torch.linalg.svdvals(average).sum().item()

    q = torch.zeros_like(lengths) if start is None else start / unit
    best, least = feasible(q)
    dual = here.new_zeros(here.numel() + 2)
    sums, count = [torch.zeros_like(q), torch.zeros_like(dual)], 0
    for iteration in range(iterations):
        moved = (q - step * (matrix @ dual)).clamp(min=0)
        dual = dual + step * ((2 * moved - q) @ matrix)
        x = truncated(dual[:-2].reshape(here.shape) + step * here, 1.0)
        dual = torch.cat([x.flatten(), (dual[-2:] - step * size).clamp(min=0)])
        q = moved
        sums, count = [sums[0] + q, sums[1] + dual], count + 1
        if count == 50 or iteration == iterations - 1:
            average = sums[0] / count
            visited = [feasible(point) for point in (q, average)]
            best, least = min([(best, least), *visited], key=lambda pair: pair[1])
            if visited[1][1] <= visited[0][1]:
                q, dual = average, sums[1] / count
            sums, count = [torch.zeros_like(q), torch.zeros_like(dual)], 0
    return best * unit


class _Pairs(NamedTuple):
    """Pairs W + Δ and W − cΔ."""

    offsets: Tensor
    """Δ, (k, m, n)."""
    ratios: Tensor
    """c, (k,)."""

    @classmethod
    def none(cls, w: Tensor) -> "_Pairs":
        return cls(w.new_zeros(0, *w.shape), w.new_zeros(0))

    def joined(self, other: "_Pairs") -> "_Pairs":
        return _Pairs(*(torch.cat(parts) for parts in zip(self, other, strict=True)))

    def at(self, kept: Tensor) -> "_Pairs":
        return _Pairs(self.offsets[kept], self.ratios[kept])

    def points(self) -> Tensor:
        """Both offsets of every pair, (2k, m, n)."""
        return torch.cat([self.offsets, -self.ratios[:, None, None] * self.offsets])

    def lengths(self) -> Tensor:
        """The mean distance of every pair, (k,)."""
        c = self.ratios.double()
        return 2 * c / (1 + c) * operator_norm(self.offsets).double()

    def law(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The offsets of all points and their probabilities."""
        c = self.ratios.double()
        return self.points(), torch.cat([weights * c / (1 + c), weights / (1 + c)])


class _Around:
    """Gradients around W, each with so many draws."""

    def __init__(self, gradient: Gradient, w: Tensor, draws: int) -> None:
        self.gradient, self.w, self.draws = gradient, w, draws

    def samples(self, offsets: Tensor) -> Tensor:
        """The gradient at W + Δ, (draws, k, m, n), in float64."""
        points = (self.w + offsets).repeat(self.draws, 1, 1)
        found = self.gradient(points)
        if found.shape != points.shape:
            raise ValueError(
                f"gradient must map (k, m, n) to (k, m, n), gave {tuple(found.shape)} for "
                f"{tuple(points.shape)}"
            )
        _checks.finite("the gradient around w", found)
        return found.double().unflatten(0, (self.draws, len(offsets)))

    def means(self, pairs: _Pairs) -> Tensor:
        """ḡ of every pair, (k, m, n)."""
        ahead, behind = self.samples(pairs.points()).mean(0).chunk(2)
        share = (pairs.ratios / (1 + pairs.ratios)).double()[:, None, None]
        return share * ahead + (1 - share) * behind

    def averages(self, offsets: Tensor, weights: Tensor) -> Tensor:
        """E ∇L(Y) of each draw, the point with the weight that is left, (draws, m, n)."""
        points = torch.cat([torch.zeros_like(self.w).unsqueeze(0), offsets])
        p = torch.cat([1 - weights.sum().reshape(1), weights])
        return torch.einsum("k,dkmn->dmn", p, self.samples(points))


def _proposals(
    found: _Pairs,
    weights: Tensor,
    w: Tensor,
    slope: Tensor,
    rho: float,
    pairs: int,
    seed: int,
    generation: int,
) -> _Pairs:
    """New pairs: half near those that have weight, half of any direction, length and ratio.

    Of the latter, every other one lies along W or along the steepest direction, where kinks are met
    head on.
    """
    place: dict[str, Any] = {"dtype": w.dtype, "device": w.device}
    key = {"seed": seed ^ _NOISE_SEED, "step": generation}
    normal = noise.normal((pairs, *w.shape), stream=0, **key, **place)
    uniform = noise.uniform((4, pairs), stream=1, **key, **place)
    direction = normal / operator_norm(normal)[:, None, None]
    ahead = torch.stack([w / operator_norm(w).clamp(min=1e-30), polar(slope.to(w.dtype))])
    ahead = torch.cat([ahead, -ahead])
    direction[::4] = ahead[torch.arange(len(direction[::4]), device=w.device) % 4]
    length = rho * 10 ** (_REACH * uniform[0] - _REACH / 4)
    ratios = 10 ** (_LOPSIDED * (2 * uniform[3] - 1))
    ratios[::3] = 1.0
    proposed = _Pairs(direction * length[:, None, None], ratios)
    if not len(weights):
        return proposed
    generator = torch.Generator().manual_seed(seed + generation)
    chosen = torch.multinomial(weights.cpu(), pairs, replacement=True, generator=generator)
    parent = found.at(chosen.to(w.device))
    spread = 10 ** (-4 * uniform[1])
    stretch = 1 + (2 * uniform[2] - 1) * spread
    turn = (operator_norm(parent.offsets) * spread)[:, None, None] * normal / math.sqrt(w.numel())
    turn[1::4] = 0  # half of them only change in length
    moved = stretch[:, None, None] * parent.offsets + turn
    ratios = parent.ratios * (1 + (2 * uniform[3] - 1) * spread)
    ratios[::3] = (parent.ratios / stretch)[::3]  # the other end stays where it is
    near = torch.arange(pairs, device=w.device) % 2 == 1
    offsets = torch.where(near[:, None, None], moved, proposed.offsets)
    return _Pairs(offsets, torch.where(near, ratios, proposed.ratios))


def _within(rho: float, offsets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, float]:
    """A law with its mean distance, which rounding must not leave above ρ."""
    lengths = operator_norm(offsets).double()
    while (distance := (weights * lengths).sum().item()) > rho:
        weights = weights * (rho / distance * (1 - 1e-15))
    return offsets, weights, distance


def _margin(centered: Tensor, confidence: float, seed: int) -> float:
    """The quantile of ‖Σ z_j(g_j − ḡ)‖_*/√(k(k−1)u) over normal z and u = χ²_{k−1}/(k−1)."""
    draws = len(centered)
    normal = noise.normal(
        (_RESAMPLES, 2 * draws - 1),
        seed=seed ^ _NOISE_SEED,
        stream=2,
        dtype=centered.dtype,
        device=centered.device,
    )
    z, others = normal[:, :draws], normal[:, draws:]
    student = z / others.square().sum(1, keepdim=True).mul(draws).sqrt()
    norms = nuclear_norm(torch.einsum("rd,dmn->rmn", student, centered))
    # A norm of the same law as the resampled ones is below the r-th of them with chance r/(R+1).
    return norms.sort().values[math.ceil((_RESAMPLES + 1) * confidence - 1e-9) - 1].item()
