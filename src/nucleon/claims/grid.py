"""Games as data: learners × streams × shapes × variants, played with progress, and hard streams."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nucleon.claims.engine import Check, Row, Rows, Run, at_least, at_most, stage_of
from nucleon.claims.shown import Series
from nucleon.online import game as online
from nucleon.online import streams
from nucleon.online.adversary import Ratio, Searched, measure
from nucleon.online.game import Trace
from nucleon.online.learners import GBPA, Learner
from nucleon.online.o2nc.plans import Interval
from nucleon.online.regret import Ledger
from nucleon.online.streams import Stream, WorstCase, replay

F64 = torch.float64
RECORDED = 64
"""Games beside each other whose curves are written to the trace."""
Make = Callable[..., Learner]
MakeStream = Callable[..., Stream]


def stream(name: str, **fixed: Any) -> MakeStream:
    """Return a maker of a stream of `nucleon.online.streams`, looked up when it is called."""
    return lambda shape, **options: getattr(streams, name)(shape, **fixed, **options)


NINE: Mapping[str, MakeStream] = {
    **{n: stream(n) for n in ("alternating", "gaussian")},
    "low-rank": stream("low_rank"),
    "ill-conditioned": stream("ill_conditioned"),
    "drifting": stream("drifting", period=100),
    "sparse": stream("sparse"),
    "heavy-tailed": stream("heavy_tailed"),
    "greedy": stream("adversary"),
    "orthogonal": stream("adversary", kind="orthogonal"),
}
"""The streams of the theorems' claims; those of `ADAPTIVE` answer the action."""
ADAPTIVE = ("greedy", "orthogonal")


# ---------------------------------------------------------------------- games


class Game(Row):
    """A game: the fields of its case, its trace, and its learner as it is afterwards."""

    trace: Trace
    learned: Learner

    @property
    def regret(self) -> Tensor:
        """Return the regrets after the last round, (b,)."""
        return self.trace.regret[-1]

    @property
    def bound(self) -> Tensor:
        """Return the bounds after the last round, (b,)."""
        return self.trace.bound[-1]

    @property
    def ratio(self) -> float:
        """Return the largest regret over its bound, in any game after any recorded round.

        It is 0 where both are 0, as for OGD before its first nonzero gradient.
        """
        regret, bound = self.trace.regret, self.trace.bound
        nothing = (regret == 0) & (bound == 0)
        return torch.where(nothing, 0.0, regret / bound).max().item()

    @property
    def mean_ratio(self) -> Interval:
        """Return the last regret over its bound, in the mean over the games."""
        return Interval.of_mean(self.regret / self.bound)

    @property
    def growth(self) -> float:
        """Return the exponent with which the regret grows in T, in the mean over the games."""
        return exponent(self.trace.rounds, self.trace.regret.mean(1))

    @property
    def outside(self) -> float:
        """Return the largest ‖X_t‖/D − 1."""
        return self.trace.norm.max().item() / self.trace.radius - 1

    @property
    def pair(self) -> str:
        """Return the mean regret beside the mean bound, for a table."""
        return f"{self.regret.mean():.1f} / {self.bound.mean():.1f}"

    def curve(
        self, name: str, style: int, values: Tensor | None = None, *, band: bool = False
    ) -> Series:
        """Return the mean over the games, with their range as a band, from the fifth round on.

        The values, (R, b), are the regrets where none are passed. A log-log plot would give the
        earlier rounds most of its width.
        """
        rounds, values = self.trace.rounds, self.trace.regret if values is None else values
        late = [i for i, t in enumerate(rounds) if t >= 5]
        line = Series.spanning(name, [float(rounds[i]) for i in late], values[late], style)
        return line if band else replace(line, low=None, high=None)

    def record(self) -> dict[str, object]:
        """Return the fields, rounds, regrets and bounds, if there are, of the first games."""
        trace = self.trace
        first = (slice(None), slice(RECORDED))[: trace.regret.ndim]
        bound = trace.bound[first].tolist() if bool(trace.bound.isfinite().all()) else None
        regret = trace.regret[first].tolist()
        curves = {"rounds": list(trace.rounds), "regret": regret, "bound": bound}
        return {**super().record(), **curves}


class RoundCounter(Ledger):
    """A ledger that measures no regret, which takes an SVD a round.

    The first gradient of a game must not be zero.
    """

    def record(self, gradient: Tensor, action: Tensor, *, oblivious: bool = False) -> None:
        """Count the round, and note that there was a gradient, before which every action is 0."""
        self.rounds, self.largest = self.rounds + 1, torch.ones_like(self.largest)


class Match(NamedTuple):
    """A game to be played: the fields of its row, the learner, the stream, and how many rounds."""

    case: Mapping[str, Any]
    learner: Learner
    stream: Stream
    rounds: int
    watch: Mapping[str, Callable[[Any], Tensor]] = {}
    """Fields that are measured of the learner after each recorded round, (R, b)."""
    delta: float | None = None


def play_all(run: Run, matches: Iterable[Match]) -> Rows:
    """Play games, advance the progress by their rounds, and return a `Game` of each."""
    every = list(matches)
    run.progress.begin(sum(match.rounds for match in every))
    return run.keep(Rows(_played(run, match) for match in every))


def _played(run: Run, match: Match) -> Game:
    stage, done = stage_of(match.case), 0
    watched = {name: list[Tensor]() for name in match.watch}

    def on_record(row: online.RecordedRound) -> None:
        nonlocal done
        run.progress.advance(row.round - done, stage)
        done = row.round
        for name, measured in watched.items():
            measured.append(match.watch[name](match.learner))

    learner, rounds = match.learner, match.rounds
    trace = online.play(learner, match.stream, rounds, on_record=on_record, delta=match.delta)
    seen = {name: torch.stack(measured) for name, measured in watched.items()}
    return Game(**match.case, **seen, trace=trace, learned=learner)


@dataclass(frozen=True)
class Grid:
    """Games of every learner on every stream in every shape and variant, in float64.

    Args:
        learners: by name; each is made with a shape, `game` and the options of the variant.
        streams: by name; each is made with a shape, the gradient bound and a seed.
        shapes: (m, n) of one game.
        rounds: (full, quick).
        games: number of games side by side, (full, quick); the user's `seeds` overrides it.
        game: options of every learner.
        variants: further options; `factor` multiplies the theorem's η.
        keep: returns True for a case that is played (all of them).
        draws: least number of games of a learner that draws noise (1).
        watch: fields that are measured of the learner after each recorded round.
        first_seed: added to the user's first seed for the streams (0).
    """

    learners: Mapping[str, Make]
    streams: Mapping[str, MakeStream]
    shapes: Sequence[tuple[int, int]]
    rounds: tuple[int, int]
    games: tuple[int, int]
    game: Mapping[str, Any] = field(default_factory=dict[str, Any])
    variants: Sequence[Mapping[str, Any]] = ({},)
    keep: Callable[[Any], bool] = lambda case: True
    draws: int = 1
    watch: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict[str, Any])
    first_seed: int = 0

    def matches(self, run: Run) -> Iterator[Match]:
        count, rounds = len(run.seeds(self.games)), run.pick(self.rounds)
        bound = self.game.get("gradient_bound", 1.0)
        source = {"bound": bound, "seed": self.first_seed + run.seed, "dtype": F64}
        points = itertools.product(self.shapes, self.streams, self.learners, self.variants)
        for shape, source_name, name, variant in points:
            case = {"learner": name, "stream": source_name, "shape": shape, **variant}
            if not self.keep(Row(**case)):
                continue
            make, options = self.learners[name], {"dtype": F64, **self.game, **variant}
            if "factor" in options:
                options["eta"] = options.pop("factor") * cast(Any, make)(shape).eta
            player = make((count, *shape), **options)
            if getattr(player, "is_random", False):
                player = make((max(count, self.draws), *shape), seed=run.seed, **options)
            against = self.streams[source_name](player.shape, **source)
            yield Match(case, player, against, rounds, self.watch)


def play(run: Run, grid: Grid) -> Rows:
    return play_all(run, grid.matches(run))


def exponent(rounds: Sequence[float], values: Tensor) -> float:
    """Return the slope of log values, (R,), in log t over the last decade of the rounds."""
    t = torch.tensor(rounds, dtype=F64)
    late = t >= t[-1] / 10
    x, y = t[late].log(), values[late].log()
    x = x - x.mean()
    return (x @ y / (x @ x)).item()


def gradients_of(source: Stream, rounds: int) -> Tensor:
    """Return the first gradients of a stream that answers no action, (T, …, m, n)."""
    return torch.stack([source.gradient(t) for t in range(1, rounds + 1)])


# ---------------------------------------------------------------------- the lower side

LEAST: Mapping[str, float] = {
    "FTRL": 0.9,
    "FTPL": 0.4,
    "FAML": 0.8,
    "one-sided": 0.6,
    "Shampoo": 0.4,
    "Kronecker FTRL": 0.9,
    "scalar GBPA": 0.8,
}
"""Least share of its bound that each learner loses on the swing of 200 rounds: a regression line,
the measured share rounded down. A bound that is too large misses it."""
SWING_ROUNDS = 200


def swing(rounds: int, push: float = math.sqrt(2)) -> Tensor:
    """Return signs, (T,), float64: they alternate, and the last push·√T lead to the other edge.

    Alternating costs every learner about what its bound allows without movement. The way across the
    ball of diameter 2D, √(2T) rounds of gradient descent with η = √2·D, costs most of that again.
    """
    last = math.ceil(push * math.sqrt(rounds))
    signs = -((-1.0) ** torch.arange(1, rounds + 1, dtype=F64))
    signs[-last:] = -1.0
    return signs


def swung(learner: Learner, bound: float = 1.0) -> float:
    """Return mean regret/bound on G·I times a swing of 2√T, from ½G·I on."""
    signs = swing(SWING_ROUNDS, 2.0)
    signs[0] = 0.5
    identity = bound * torch.eye(*learner.shape[-2:], dtype=F64)
    gradients = signs.reshape(-1, *(1 for _ in learner.shape)) * identity.expand(learner.shape)
    trace = online.play(learner, replay(gradients), SWING_ROUNDS, record=SWING_ROUNDS)
    return (trace.regret[-1] / trace.bound[-1]).mean().item()


def worst_streams(run: Run, learner: str) -> list[WorstCase]:
    """Return the worst streams on file for a learner; in a quick run those of at most 30 rounds."""
    longest = 30 if run.quick else math.inf
    return [c for c in streams.worst_cases() if c.learner == learner and c.rounds <= longest]


def replayed(run: Run, case: WorstCase) -> tuple[Ratio, float]:
    """Return a learner's share of its bound on a stream on file, and the distance to that on file.

    The distance is over 5 standard errors of both for FTPL, whose noise is not that of the search,
    and for the others over 1e-4, which is more than FTRL's solver leaves open.
    """
    games, seed = len(run.seeds((64, 16))), 10_000 + run.seed
    ratio = measure(cast(Searched, case.learner), case.gradients, games=games, first_seed=seed)
    margin = 5 / 3 * math.hypot(ratio.margin, case.margin)
    return ratio, abs(ratio.value - case.ratio) / (margin or 1e-4)


def lower_side(
    run: Run, name: str, make: Callable[..., GBPA], shape: tuple[int, ...], bound: float = 1.0
) -> Iterator[Check]:
    """Check that FTRL, FTPL or FAML loses its share on the swing and on the worst streams."""
    share = swung(make(shape, radius=1.0, gradient_bound=bound, dtype=F64), bound)
    yield at_least(f"{name} on the swing: regret/bound", share, LEAST[name])
    worst = worst_streams(run, name.lower())
    apart = [replayed(run, case)[1] for case in worst]
    yield at_most(f"{name} on {len(worst)} worst streams: share's distance to the file", apart, 1)
