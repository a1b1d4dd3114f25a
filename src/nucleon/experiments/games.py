"""What the claims on the online game share: play with progress, growth rates, hard streams."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nucleon.experiments.base import Check, Progress, Series
from nucleon.game import Row, Trace, play
from nucleon.learners import Learner
from nucleon.streams import Shape, Stream, replay

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
) -> Trace:
    """Play a game, telling `progress` of its rounds and `watch` of those that are recorded."""
    done = 0

    def tell(row: Row) -> None:
        nonlocal done
        progress.advance(row.round - done, stage)
        done = row.round
        watch(row)

    return play(learner, stream, rounds, on_record=tell)


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
"""The share of its bound that each learner loses on the swing, at least; a bound that is too large
does not pass. A tenth below what 200 rounds showed when this was settled, rounded."""
SWING_ROUNDS = 200
STORED = Path(__file__).parent / "streams"
"""Streams found by search, a JSON file each; there need be none."""


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
    return share(learner, gradients)


def share(learner: Learner, gradients: Tensor) -> float:
    """Regret over bound after the last of some gradients, (T, …, m, n), in the mean over games."""
    trace = play(learner, replay(gradients), len(gradients), record=len(gradients))
    return (trace.regret[-1] / trace.bound[-1]).mean().item()


@dataclass(frozen=True)
class Stored:
    """A stream that a search found for a learner, and the share of its bound that it reached."""

    name: str
    learner: str
    radius: float
    bound: float
    ratio: float
    gradients: Tensor
    """(T, m, n), float64."""

    @property
    def shape(self) -> Shape:
        """(m, n)."""
        return tuple(self.gradients.shape[1:])


def stored(learner: str, folder: Path = STORED) -> tuple[Stored, ...]:
    """The stored streams against a learner, by the name of their file; none where there are none.

    A file holds {"learner", "radius", "bound", "ratio", "gradients": T × m × n numbers}.
    """
    found = list[Stored]()
    for file in sorted(folder.glob("*.json")):
        held = json.loads(file.read_text(encoding="utf-8"))
        if held["learner"] == learner:
            gradients = torch.tensor(held["gradients"], dtype=torch.float64)
            radius, bound, ratio = (float(held[name]) for name in ("radius", "bound", "ratio"))
            found.append(Stored(file.stem, learner, radius, bound, ratio, gradients))
    return tuple(found)


def lower_side(
    name: str, make: Callable[..., Learner], shape: Shape, bound: float = 1.0
) -> tuple[Check, ...]:
    """That a learner loses its share of the bound on the swing, and on every stored stream.

    `make` is called with a shape, `radius`, `gradient_bound` and `dtype`.
    """
    f64 = torch.float64
    swinging = make(shape, radius=1.0, gradient_bound=bound, dtype=f64)
    least = LEAST[name]
    found = [Check(f"{name} on the swing: regret/bound", swung(swinging, bound), "≥", least)]
    for s in stored(name):
        learner = make(s.shape, radius=s.radius, gradient_bound=s.bound, dtype=f64)
        reached = share(learner, s.gradients)
        found.append(Check(f"{name}, {s.name}: regret/bound", reached, "≥", 0.99 * s.ratio))
    return tuple(found)


# ---------------------------------------------------------------------- what was played


def exponent(rounds: Sequence[int], values: Tensor) -> float:
    """The slope of log values, (R,), in log t over the last decade of the rounds."""
    t = torch.tensor(rounds, dtype=torch.float64)
    late = t >= t[-1] / 10
    x, y = t[late].log(), values[late].log()
    x = x - x.mean()
    return (x @ y / (x @ x)).item()


def bound_of(trace: Trace) -> Tensor:
    """The bound of a trace, for `curve`."""
    return trace.bound


def recorded(trace: Trace, **head: object) -> dict[str, object]:
    """The record of a trace, its head first."""
    curves = {"rounds": list(trace.rounds), "regret": trace.regret.tolist()}
    finite = bool(trace.bound.isfinite().all())
    return {**head, **curves, "bound": trace.bound.tolist() if finite else None}


def text(shape: Sequence[int]) -> str:
    """A shape as m×n."""
    return f"{shape[-2]}×{shape[-1]}"


def ratio(trace: Trace) -> float:
    """The largest regret over its bound, in any game after any recorded round."""
    return (trace.regret / trace.bound).max().item()


def curve(
    name: str,
    trace: Trace,
    style: int,
    values: Callable[[Trace], Tensor] = lambda trace: trace.regret,
    *,
    band: bool = False,
) -> Series:
    """The mean over the games of a trace after each recorded round, with their range as a band.

    Rounds before the fifth are left out: a log-log plot would give them most of its width.
    """
    late = [i for i, t in enumerate(trace.rounds) if t >= 5]
    v = values(trace)[late]
    low, high = (v.amin(1).tolist(), v.amax(1).tolist()) if band else (None, None)
    return Series(
        name, [float(trace.rounds[i]) for i in late], v.mean(1).tolist(), low, high, style
    )


def worst(values: Sequence[float]) -> float:
    """The largest of some numbers, NaN if one of them is."""
    return math.nan if any(map(math.isnan, values)) else max(values)
