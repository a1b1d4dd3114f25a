"""average-schedule: what an average does instead of a schedule, and where it does not.

Theorems of ours, derived in docs/theory.md.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nucleon.claims.engine import Claim, Item, Run, at_least, at_most, below, cases
from nucleon.claims.shown import Figure, Panel, Series, level
from nucleon.online import theory
from nucleon.optim import average

F64 = torch.float64
EXCESS = {0.05: 0.0004, 0.1: 0.0015, 0.15: 0.0034, 0.2: 0.0063, 0.25: 0.0101}
"""Largest excess of the squared bias in continuous time, by f; steps add one in T."""
CELLS = 4
"""Cells of the trapezoidal rule in continuous time, per step in discrete time."""
FLOOR = 0.425
"""The least loss over η of an average at the kink."""
CURVATURES, STEPS = 4000, (2000, 500)
POWERS, RULES = (0, 2, 8), ("constant", "falling")
CONVEX_STEPS, CONVEX_RUNS, DIMENSION = (4000, 500), (200, 50), 10
KINK_STEPS, KINK_RUNS = (1000, 4000), (8000, 2000)
SHOWN = slice(None, None, 40)
"""Curvatures of the figure."""


# ------------------------------------------------------------------ curvature by curvature


class Responses(NamedTuple):
    """Factors of an average and of a cooldown over the last 2f, an entry for each curvature.

    w ← w − η_t(h(w − w*) + noise), a = ηh: the factor on the first distance, and the sum of the
    squared factors on the noise of each step, over η².
    """

    bias: Tensor
    noise: Tensor
    cooled_bias: Tensor
    cooled_noise: Tensor


def discrete(fraction: float, curvatures: Tensor, steps: int) -> Responses:
    weights = theory.average_weights(fraction, steps)
    times = torch.arange(1, steps + 1, dtype=F64)
    rates = ((steps - times + 1) / (2 * fraction * steps)).clamp_max(1.0)
    once, squares = torch.zeros_like(curvatures), torch.zeros_like(curvatures)
    left, cooled = torch.ones_like(curvatures), torch.zeros_like(curvatures)
    for weight, rate in zip(weights.flip(0).tolist(), rates.flip(0).tolist(), strict=True):
        once = weight + (1 - curvatures) * once  # of a noise at this step, in the average
        squares += once.square()
        cooled += (rate * left).square()
        left = left * (1 - rate * curvatures)
    return Responses((1 - curvatures) * once, squares, left, cooled)


def continuous(fraction: float, curvatures: Tensor, cells: int) -> Responses:
    """Return the responses for T → ∞ at fixed curvatures ηhT, the noise over T as well.

    The average's factor on a noise at time v is (p+1)∫_v^1 u^p e^(−x(u−v))du, the cooldown's
    c(v)e^(−x∫_v^1 c) with its rate c.
    """
    times = torch.linspace(1, 0, cells + 1, dtype=F64)
    rates = ((1 - times) / (2 * fraction)).clamp_max(1.0)
    left = torch.cumulative_trapezoid(rates, dx=1 / cells).tolist()
    density = (1 / fraction - 1) * times.pow(1 / fraction - 2) / (2 * cells)
    kept, once = (-curvatures / cells).exp(), torch.zeros_like(curvatures)
    squares, cooled = torch.zeros_like(once), torch.zeros_like(once)
    for i, rate in enumerate(rates[1:].tolist()):
        squares += once.square() / (2 * cells)
        once = kept * (once + density[i]) + density[i + 1]
        squares += once.square() / (2 * cells)
        cooled += (rate * (-curvatures * left[i]).exp()).square() / cells
    last = (-curvatures * left[-1]).exp()  # at v = 0, half a cell; at v = 1 the rate is 0
    cooled -= last.square() / (2 * cells)
    return Responses(once, squares, last, cooled)


def compared(fraction: float, count: int, steps: int) -> dict[str, Any]:
    """Compare both over curvatures from 1e-5 to 1.9, and for ηhT from 0 to 1000 in the limit."""
    gentle = torch.logspace(-5, 0, count, dtype=F64)
    flat = discrete(fraction, gentle, steps)
    sharp = discrete(fraction, torch.linspace(1, 1.9, count // 4, dtype=F64), steps)
    curvatures = torch.cat((torch.zeros(1), torch.logspace(-3, 3, count, dtype=F64)))
    limit = continuous(fraction, curvatures, CELLS * steps)

    def excess(r: Responses) -> float:
        return (r.bias.square() - r.cooled_bias.square()).max().item() - EXCESS[fraction]

    def between(r: Responses) -> float:
        # Every factor falls in the curvature up to 1, so between two points the left average
        # beside the right cooldown is the worst.
        return (r.noise[:-1] / r.cooled_noise[1:]).max().item()

    return {
        "noise": max((r.noise / r.cooled_noise).max().item() for r in (flat, sharp)),
        "between": between(flat),
        "excess": max(excess(flat), excess(sharp)),
        "limit_noise": between(limit),
        "limit_excess": excess(limit),
        "_curvatures": gentle[SHOWN].tolist(),
        "_ratios": (flat.noise / flat.cooled_noise)[SHOWN].tolist(),
    }


# ------------------------------------------------------------------ convex, at every horizon


def convex(rule: str, power: int, steps: int, runs: int, seed: int) -> dict[str, float]:
    """Return the largest loss of the average over its bound at any T, of projected SGD.

    f(w) = mean |⟨a_k, w − w*⟩| on the unit ball, ‖a_k‖ = 1, a gradient of one k a step.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, best = (
        normalize(torch.randn(count, DIMENSION, dtype=F64, generator=generator), dim=1)
        for count in (40, 1)
    )
    if rule == "constant":
        rate, of_rule = steps**-0.5, theory.average_constant_rate_bound
        bound = partial(of_rule, power, rate=rate, distance=1.0, gradient_norm=1.0)
    else:
        rate, of_rule = 2**0.5, theory.average_falling_rate_bound
        bound = partial(of_rule, power, rate=rate, diameter=2.0, gradient_norm=1.0)
    shares = average.share(1 / (power + 2), torch.arange(1, steps + 1, dtype=F64)).tolist()
    w, mean, ratios = *torch.zeros(2, runs, DIMENSION, dtype=F64), list[float]()
    for t, share in enumerate(shares, 1):
        mean = mean + share * (w - mean)
        ratios.append(((mean - best) @ rows.mT).abs().mean(1).mean().item() / bound(t))
        chosen = rows[torch.randint(len(rows), (runs,), generator=generator)]
        sign = ((w - best) * chosen).sum(1, keepdim=True).sign()
        w = w - (rate if rule == "constant" else rate * t**-0.5) * sign * chosen
        w = w / w.norm(dim=1, keepdim=True).clamp_min(1.0)
    return {"largest": max(ratios)}


def kink(steps: int, runs: int, seed: int) -> dict[str, float]:
    """Return the mean loss over η of the average, and of the last iterate of a linear decay.

    f(w) = ½w₊ + w₋/20, gradients ±1 of the mean f'(w), W_1 = 0.3η.
    """
    generator = torch.Generator().manual_seed(seed)
    steady, decayed = (torch.full((runs,), 0.3, dtype=F64) for _ in range(2))
    mean = torch.zeros_like(steady)

    def value(w: Tensor) -> float:
        return torch.where(w > 0, w / 2, -w / 20).mean().item()

    def moved(w: Tensor, rate: float) -> Tensor:
        slope = torch.where(w > 0, 0.5, -0.05)
        uniform = torch.rand(runs, dtype=F64, generator=generator)
        return w - rate * torch.where(uniform < (1 + slope) / 2, 1.0, -1.0)

    shares = average.share(0.1, torch.arange(1, steps + 1, dtype=F64)).tolist()
    for t, share in enumerate(shares):
        mean += share * (steady - mean)
        steady, decayed = moved(steady, 1.0), moved(decayed, 1 - t / steps)
    return {"average": value(mean), "decayed": value(decayed)}


# ------------------------------------------------------------------ the claim


def measure(run: Run) -> Iterator[Item]:
    steps = run.pick(STEPS)
    each = partial(compared, count=CURVATURES, steps=steps)
    rows = run.each(cases(fraction=EXCESS), each)
    name = "mean age f against a cooldown of 2f"
    yield at_most(f"{name}: noise, largest ratio", rows.column("noise"), 1.0)
    yield at_most(f"{name}: and between the points", rows.column("between"), 1.0)
    yield at_most(f"{name}: squared bias, above its excess", rows.column("excess"), 1 / steps)
    name = "the same in continuous time"
    yield at_most(f"{name}: noise, largest ratio", rows.column("limit_noise"), 1.0)
    yield at_most(f"{name}: squared bias, above its excess", rows.column("limit_excess"), 0.0)
    sizes = {"steps": run.pick(CONVEX_STEPS), "runs": run.pick(CONVEX_RUNS), "seed": run.seed}
    bounds = run.each(cases(rule=RULES, power=POWERS), partial(convex, **sizes))
    for rule in RULES:
        largest = bounds.where(rule=rule).column("largest")
        yield at_most(f"convex SGD, {rule} rate: loss/bound at every T, largest", largest, 1.0)
    each = partial(kink, runs=run.pick(KINK_RUNS), seed=run.seed)
    kinks = run.each(cases(steps=KINK_STEPS), each)
    yield at_least("kink: loss of the average over η", kinks.column("average"), FLOOR)
    short, long = kinks.column("decayed")
    yield below("kink: loss of a linear decay over η", short, FLOOR)
    yield below("kink: the same at four times the T, over it", long / short, 1.0)

    columns = {"f": "fraction", "noise/cooldown's": "noise", "squared bias, above": "excess"}
    columns |= {"noise for T → ∞": "limit_noise", "squared bias for T → ∞": "limit_excess"}
    yield rows.listing("An average of mean age f against a cooldown over the last 2f", columns)
    lines = [
        Series(f"f = {row.fraction:g}", row._curvatures, row._ratios, style=style)
        for style, row in enumerate(rows)
    ]
    lines.append(level("the cooldown's", rows[0]._curvatures))
    yield Figure(
        "noise",
        "Noise of an average of mean age f, over that of a cooldown of the last 2f",
        f"By the curvature times the rate, for T = {steps}: at most 1, so for every spectrum.",
        (Panel("constant rate", "ηh", "noise/cooldown's", tuple(lines), x_scale="log"),),
    )
    yield (
        "The average is not ahead of every schedule: where the minimum is a kink with unequal "
        "slopes, decay wins at the same peak rate by a factor without bound."
    )


CLAIM = Claim(
    id="average-schedule",
    title="An average in the place of a schedule (ours)",
    statement=(
        "At a constant rate the average of mean age f has at most the noise of a cooldown over "
        "the last 2f, at every curvature and horizon of one run; at a kink decay wins."
    ),
    place="Not in the paper: theorems of ours, docs/theory.md",
    tolerance=(
        f"The noise is at most the cooldown's at every curvature, the squared bias at most "
        f"{EXCESS[0.1]:g} larger at f = 0.1; losses are within the bounds at every T; at the kink "
        f"the average stays above {FLOOR:g}η while decay falls below it, further at a longer T."
    ),
    measure=measure,
    seconds=(10.0, 1.0),
)
