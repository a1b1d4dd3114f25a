"""What the claims on the online game share: play with progress, growth rates, curves."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nucleon.experiments.base import Progress, Series
from nucleon.game import Row, Trace, play
from nucleon.learners import Learner
from nucleon.streams import Stream

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


def exponent(rounds: Sequence[int], values: Tensor) -> float:
    """The slope of log values, (R,), in log t over the last decade of the rounds."""
    t = torch.tensor(rounds, dtype=torch.float64)
    late = t >= t[-1] / 10
    x, y = t[late].log(), values[late].log()
    x = x - x.mean()
    return (x @ y / (x @ x)).item()


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
