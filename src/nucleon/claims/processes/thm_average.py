"""thm-average: the conversion with the average of all iterates, at every horizon of one run.

A theorem of ours beside Proposition G.1, derived in docs/theory.md.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.engine import Claim, Item, Run, at_least, at_most, cases
from nucleon.claims.shown import Figure, Series, log_panel
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.online import theory
from nucleon.online.learners import FAML
from nucleon.online.problems import random_ripples
from nucleon.optim import average

F64 = torch.float64
SHAPE, FRACTION, DISCOUNT, RADIUS, RHO, NOISE = (3, 5), 0.1, 0.9, 0.02, 0.3, 0.3
ROUNDS, RUNS = (400, 100), (256, 96)
PROBLEMS, RADII = ("linear", "ripples", "waves"), ("constant", "falling", "ρσ", "ρ/t^⅔")
HORIZON = 4000
"""To which the sums that no run enters are taken."""
DEVIATIONS = 4.5
"""A mean of runs is so many of its standard errors from its expectation less than once in 10⁵."""
EXACT = 1e-9

Matrices = Callable[[Tensor], Tensor]


def loss_of(problem: str, seed: int) -> tuple[Matrices, Matrices]:
    """Return value and gradient of a loss on (b, m, n)."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, dtype=F64, generator=generator)
    if problem == "linear":
        slope = normal(*SHAPE)
        return lambda w: (w * slope).sum((-2, -1)), lambda w: slope.expand_as(w)
    if problem == "ripples":
        ripples = random_ripples([seed], shape=SHAPE, measurements=12)
        return ripples.value, ripples.gradient
    waves, phases = 2 * normal(8, *SHAPE), 6 * normal(8)

    def angles(w: Tensor) -> Tensor:
        return torch.einsum("kmn,bmn->bk", waves, w) + phases

    return (
        lambda w: angles(w).cos().mean(-1),
        lambda w: torch.einsum("bk,kmn->bmn", -angles(w).sin() / 8, waves),
    )


def schedule(radii: str, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares σ_t, the radii D_t, t = 1 … T, and the weights of W_1 … W_T in W̄."""
    times = torch.arange(1, rounds + 1, dtype=F64)
    if radii == "ρ/t^⅔":
        shares = times.pow(-2 / 3)
        kept = (1 - shares).flip(0).cumprod(0).flip(0).roll(-1)
        kept[-1] = 1.0
        return shares, RHO * shares, shares * kept
    shares, weights = average.share(FRACTION, times), theory.average_weights(FRACTION, rounds)
    if radii == "ρσ":
        return shares, RHO * shares, weights
    fall = 1 + times / 20 if radii == "falling" else torch.ones_like(times)
    return shares, RADIUS * fall.pow(-0.5), weights


def measured(problem: str, radii: str, runs: int, rounds: int, seed: int) -> dict[str, Any]:
    """Measure both sides of Theorem A at every T, and the rest at the end.

    W_t = W_{t−1} + s_tD_tY_t with FAML's plays Y_t of the unit ball, s_t ~ Exp(1).
    """
    value, gradient = loss_of(problem, seed)
    shares, lengths, weights = schedule(radii, rounds)
    learner = FAML((runs, *SHAPE), gradient_bound=None, discount=DISCOUNT, dtype=F64)
    generator = torch.Generator().manual_seed(seed + 1)
    w = torch.randn(runs, *SHAPE, dtype=F64, generator=generator)
    start = before = first = value(w)
    # Averages with the shares σ of ∇L, the noise, G and W, and of ⟨G, Y⟩ and the descent over D.
    matrices, numbers = w.new_zeros(4, *w.shape), w.new_zeros(2, runs)
    scaling, decrease, played, total = (torch.zeros_like(x) for x in (start, start, start, w))
    regrets, sides, path, largest = list[Tensor](), list[Tensor](), list[Tensor](), 0.0
    for t, (share, length) in enumerate(zip(shares.tolist(), lengths.tolist(), strict=True), 1):
        play = learner.play()
        s = noise.exponential((runs,), seed=seed, stream=torch.arange(runs), step=t, dtype=F64)
        w = w + s[:, None, None] * length * play
        truth, after = gradient(w), value(w)
        error = torch.zeros_like(w)
        if problem != "linear":
            error = NOISE * torch.randn(w.shape, dtype=F64, generator=generator)
        answer = truth + error
        learner.observe(answer)
        earned = (answer * play).sum((-2, -1))
        matrices = matrices + share * (torch.stack((truth, error, answer, w)) - matrices)
        numbers = numbers + share * (torch.stack((earned, (before - after) / length)) - numbers)
        scaling = scaling + (after - before - length * (truth * play).sum((-2, -1)))
        decrease = decrease + share * (first - before)
        first = first + share * (before - first)
        played, total = DISCOUNT * played + earned, DISCOUNT * total + answer
        regrets.append(played + nuclear_norm(total))
        largest = max(largest, nuclear_norm(answer).max().item())
        left, noisy, best, _ = nuclear_norm(matrices)
        sides.append(torch.stack((left, numbers[1] + numbers[0] + best + noisy)))
        path.append(w)
        before = after
    both, iterates, mean = torch.stack(sides), torch.stack(path), matrices[3]
    distance = torch.einsum("t,t...->...", weights, operator_norm(iterates - mean))
    limit = cut_bound(shares, lengths)[-1]
    regret = numbers[0] + nuclear_norm(matrices[2])
    return {
        "left": both[:, 0].mean(1).tolist(),
        "right": both[:, 1].mean(1).tolist(),
        "equality": max(deviations(both[t, 0] - both[t, 1]) for t in (rounds // 4, rounds - 1)),
        "scaling": deviations(scaling),
        "distance": distance.mean().item() / limit,
        "recursion": (torch.einsum("t,t...->...", weights, iterates) - mean).abs().max().item(),
        "discounted": (regret / from_discounted(weights, regrets, largest)).max().item(),
        "window": (numbers[1] - (first - before) / RHO).abs().max().item(),
        "telescope": (decrease - (start - first)).abs().max().item(),
    }


def cut_bound(shares: Tensor, lengths: Tensor) -> list[float]:
    """Return 2Σ_{s<T} F_s(1−F_s)D_{s+1} for every T, by recursion over T."""
    sums, once, twice = list[float](), 0.0, 0.0
    for share, length in zip(shares.tolist(), lengths.tolist(), strict=True):
        kept = 1 - share
        once, twice = kept * (once + length), kept**2 * (twice + length)
        sums.append(2 * (once - twice))
    return sums


def from_discounted(weights: Tensor, regrets: list[Tensor], largest: float) -> Tensor:
    """Return the bound of part (B) on the regret with these weights, from the discounted ones."""
    later = torch.cat((weights[1:], weights.new_zeros(1)))
    parts = weights - DISCOUNT * later
    first = int((parts < 0).sum())
    bound = torch.einsum("t,t...->...", parts.clamp_min(0), torch.stack(regrets))
    return bound + 2 * largest * DISCOUNT * weights[first].item() / (1 - DISCOUNT)


def deviations(values: Tensor) -> float:
    """Return how many standard errors the mean of runs is from zero."""
    error = values.std().item() / math.sqrt(values.numel())
    return abs(values.mean().item()) / error if error else math.nan


def measure(run: Run) -> Iterator[Item]:
    rounds = run.pick(ROUNDS)
    each = partial(measured, runs=run.pick(RUNS), rounds=rounds, seed=run.seed)
    points = cases(problem=PROBLEMS, radii=RADII)
    rows = run.each(points, lambda problem, radii: each(problem, radii))
    linear, curved = rows.where(problem="linear"), rows.where(lambda r: r.problem != "linear")
    ratios = [max(map(float.__truediv__, row.left, row.right)) for row in curved]
    yield at_most("(A) at every T: mean left/mean right, largest", ratios, 1 + EXACT)
    equality = "(A) of a linear loss: |left − right| in standard errors"
    yield at_most(equality, linear.column("equality"), DEVIATIONS)
    scaled = "E[L(W_t) − L(W_{t−1})] = E⟨∇L(W_t), X_t⟩: standard errors apart"
    yield at_most(scaled, rows.column("scaling"), DEVIATIONS)
    yield at_most("(B): regret over its discounted bound", rows.column("discounted"), 1.0)
    yield at_most("(C): mean distance to W̄ over its bound", rows.column("distance"), 1.0)
    yield at_most("W̄ beside its weights", rows.column("recursion"), EXACT)
    fixed = rows.where(lambda row: row.radii.startswith("ρ"))
    yield at_most("fixed radius: largest bound on the distance/ρ", fixed_radius(), 1.0)
    yield at_most("fixed radius: Σp(L_{s−1} − L_s)/D_s beside Δ/ρ", fixed.column("window"), EXACT)
    yield at_most("fixed radius: ΣσΔ beside L(W_0) − A", fixed.column("telescope"), EXACT)
    shares, lengths, weights = schedule("constant", HORIZON)
    sums = enumerate(cut_bound(shares, lengths), 1)
    closed = [x / theory.average_distance_bound(FRACTION, t, RADIUS) for t, x in sums]
    yield at_most("(C): the sum over its closed form, largest", closed, 1.0)
    yield at_least("(C): the sum over its closed form at the last T", closed[-1], 0.99)
    age = (weights * torch.arange(HORIZON - 1, -1, -1)).sum()
    yield at_most("mean age/(f(T−1)) − 1", abs(age / (FRACTION * (HORIZON - 1)) - 1), EXACT)

    columns = {"loss": "problem", "radii": "radii", "distance/bound": "distance"}
    columns |= {"(B)": "discounted", "left": lambda row: row.left[-1]}
    yield rows.listing("At the last T", columns | {"right": lambda row: row.right[-1]})
    times = [float(t) for t in range(5, rounds + 1)]

    def lines(row: Any) -> tuple[Series, ...]:
        bound = Series("bound", times, row.right[4:], style=1)
        return Series("‖Σp∇L(W)‖", times, row.left[4:]), bound

    labels = ("T", "nuclear norm")
    panels = (log_panel(f"{row.problem}, {row.radii}", labels, lines(row)) for row in curved)
    caption = (
        "Means over the runs, at every horizon T of one run each; the bound needs no random τ."
    )
    yield Figure("conversion", "The average gradient and its bound", caption, tuple(panels))
    yield "The radius of the average grows with T unless the learner's radii fall with the shares."


def fixed_radius() -> list[float]:
    """Return 2ΣF(1−F)σ for shares that fall in several ways, at every T: at most 1."""
    times = torch.arange(1, HORIZON + 1, dtype=F64)
    every = [average.share(f, times) for f in (0.05, 0.1, 0.5)]
    every += [times.pow(-a) for a in (0.5, 2 / 3, 1.0)]
    return [x for shares in every for x in cut_bound(shares, shares)]


CLAIM = Claim(
    id="thm-average",
    title="The average of all iterates is the model (ours)",
    statement=(
        "The average of all iterates, the late ones weighted more, is near-stationary at every "
        "horizon of one run, by the same regrets, without the random time τ."
    ),
    place="Not in the paper: a theorem of ours, docs/theory.md, after Proposition G.1",
    tolerance=(
        f"Means of the left side are at most those of the right at every T, equal for a linear "
        f"loss up to {DEVIATIONS:g} standard errors; regrets and distances are within their "
        f"bounds; identities hold to {EXACT:g}."
    ),
    measure=measure,
    seconds=(20.0, 3.0),
)
