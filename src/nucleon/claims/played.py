"""What the claims on the online game share: play with progress, growth rates, hard streams."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from nucleon.claims.base import Check, Progress, Settings, worst
from nucleon.claims.shown import Item, Series
from nucleon.online.adversary import Ratio, Searched, measure
from nucleon.online.game import Row, Trace, play
from nucleon.online.learners import GBPA, Learner
from nucleon.online.streams import Shape, Stream, WorstCase, replay, worst_cases

STYLES = {"FTL": 0, "One-sided Shampoo": 1, "FTRL": 2, "FTPL": 3, "FAML": 4}
"""The look of each learner in every figure."""
BOUND, PRINTED = 5, 6
"""The looks of a bound, both broken lines."""


def played(
    learner: Learner,
    stream: Stream,
    rounds: int,
    progress: Progress,
    stage: str,
    watch: Callable[[Row], object] = lambda row: None,
    *,
    delta: float | None = None,
) -> Trace:
    """Play a game, telling `progress` of its rounds and `watch` of those that are recorded."""
    done = 0

    def tell(row: Row) -> None:
        nonlocal done
        progress.advance(row.round - done, stage)
        done = row.round
        watch(row)

    return play(learner, stream, rounds, on_record=tell, delta=delta)


def gradients_of(stream: Stream, rounds: int) -> Tensor:
    """The first gradients of a stream that answers no action, (T, …, m, n)."""
    return torch.stack([stream.gradient(t) for t in range(1, rounds + 1)])


# ---------------------------------------------------------------------- the lower side

LEAST: Mapping[str, float] = {
    "FTRL": 0.9,
    "FTPL": 0.4,
    "FAML": 0.8,
    "One-sided Shampoo": 0.6,
    "Shampoo": 0.4,
    "Kronecker FTRL": 0.9,
    "Scalar GBPA": 0.8,
}
"""The share of its bound that each learner loses on the swing of 200 rounds, at least: a regression
line, what they lose rounded down, so that a bound that is too large does not pass."""
SWING_ROUNDS = 200


def swing(rounds: int, push: float = math.sqrt(2)) -> Tensor:
    """Signs, (T,), float64: they alternate, and the last push·√T all lead to the other edge.

    Alternating costs every learner what its bound says of standing still, the way across a ball of
    diameter 2D, which takes √(2T) rounds of gradient descent with η = √2·D, most of that again.
    """
    last = math.ceil(push * math.sqrt(rounds))
    signs = -((-1.0) ** torch.arange(1, rounds + 1, dtype=torch.float64))
    signs[-last:] = -1.0
    return signs


def swung(learner: Learner, bound: float = 1.0, rounds: int = SWING_ROUNDS) -> float:
    """Regret over bound, in the mean over the games, on G·I times a swing of 2√T, from ½G·I on."""
    signs = swing(rounds, 2.0)
    signs[0] = 0.5
    identity = bound * torch.eye(*learner.shape[-2:], dtype=torch.float64)
    gradients = signs.reshape(-1, *(1 for _ in learner.shape)) * identity.expand(learner.shape)
    trace = play(learner, replay(gradients), rounds, record=rounds)
    return (trace.regret[-1] / trace.bound[-1]).mean().item()


@dataclass(frozen=True)
class Replayed:
    """A stream that comes with the package, played again."""

    case: WorstCase
    ratio: Ratio

    @property
    def apart(self) -> float:
        """How far its share is from the one on file, over what may lie between the two.

        That is 1e-4, above what FTRL's solver leaves open, or 5 standard errors of both shares.
        """
        margin = 5 / 3 * math.hypot(self.ratio.margin, self.case.margin)
        return abs(self.ratio.value - self.case.ratio) / (margin or 1e-4)


def kept(learner: Searched, settings: Settings) -> list[WorstCase]:
    """The worst streams found for a learner; `quick` takes those of at most 30 rounds."""
    longest = 30 if settings.quick else math.inf
    return [c for c in worst_cases() if c.learner == learner and c.rounds <= longest]


def replayed(case: WorstCase, settings: Settings) -> Replayed:
    """Its learner on a kept stream; FTPL with other noise than the search had."""
    learner = cast(Searched, case.learner)
    games = len(settings.seed_range(64, 16))
    seed = 10_000 + settings.first_seed
    return Replayed(case, measure(learner, case.gradients, games=games, first_seed=seed))


def lower_side(
    name: str, make: Callable[..., GBPA], shape: Shape, settings: Settings, bound: float = 1.0
) -> tuple[Check, ...]:
    """That FTRL, FTPL or FAML loses its share of the bound on the swing and the worst streams."""
    swinging = make(shape, radius=1.0, gradient_bound=bound, dtype=torch.float64)
    cases = kept(cast(Searched, name.lower()), settings)
    apart = worst(replayed(case, settings).apart for case in cases)
    return (
        Check(f"{name} on the swing: regret/bound", swung(swinging, bound), "≥", LEAST[name]),
        Check(f"{name} on {len(cases)} worst streams: share's distance to the file", apart, "≤", 1),
    )


# ---------------------------------------------------------------------- what was played


def exponent(rounds: Sequence[int], values: Tensor) -> float:
    """The slope of log values, (R,), in log t over the last decade of the rounds."""
    t = torch.tensor(rounds, dtype=torch.float64)
    late = t >= t[-1] / 10
    x, y = t[late].log(), values[late].log()
    x = x - x.mean()
    return (x @ y / (x @ x)).item()


def growth(trace: Trace) -> float:
    """The exponent with which the regret grows in T, in the mean over the games."""
    return exponent(trace.rounds, trace.regret.mean(1))


def bound_of(trace: Trace) -> Tensor:
    """The bound of a trace, for `curve`."""
    return trace.bound


def curves(trace: Callable[[Item], Trace]) -> dict[str, Callable[[Item], object]]:
    """The fields of a record that are a game's: its rounds, regrets and bounds, if there are."""

    def bound(item: Item) -> object:
        values = trace(item).bound
        return values.tolist() if bool(values.isfinite().all()) else None

    return {
        "rounds": lambda item: list(trace(item).rounds),
        "regret": lambda item: trace(item).regret.tolist(),
        "bound": bound,
    }


def text(shape: Sequence[int]) -> str:
    """A shape as m×n."""
    return f"{shape[-2]}×{shape[-1]}"


def ratio(trace: Trace) -> float:
    """The largest regret over its bound, in any game after any recorded round.

    It is 0 where both are, as OGD's are before the first gradient that is not zero.
    """
    nothing = (trace.regret == 0) & (trace.bound == 0)
    return torch.where(nothing, 0.0, trace.regret / trace.bound).max().item()


def late(trace: Trace) -> tuple[list[int], list[float]]:
    """Where the recorded rounds from the fifth on are, and which they are.

    A log-log plot would give the earlier ones most of its width.
    """
    places = [i for i, t in enumerate(trace.rounds) if t >= 5]
    return places, [float(trace.rounds[i]) for i in places]


def curve(
    name: str,
    trace: Trace,
    style: int,
    values: Callable[[Trace], Tensor] = lambda trace: trace.regret,
    *,
    band: bool = False,
) -> Series:
    """The mean over the games of a trace after each `late` round, with their range as a band."""
    places, x = late(trace)
    series = Series.spanning(name, x, values(trace)[places], style)
    return series if band else replace(series, low=None, high=None)
