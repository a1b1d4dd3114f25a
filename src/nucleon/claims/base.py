"""What a claim of the paper is, and what a run of it returns.

A claim is one file with one `CLAIM`. Its `run` measures and returns plain data; nothing here draws,
prints or writes, so that a table, a figure and a page are made in one place for all claims.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import torch

from nucleon.claims.shown import Figure, Table

Relation = Literal["<", "≤", "≥", ">"]
_HOLDS: Mapping[Relation, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "≤": operator.le,
    "≥": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Check:
    """`measured relation threshold`, which holds or does not; a NaN never holds."""

    name: str
    measured: float
    relation: Relation
    threshold: float

    @classmethod
    def at_most(cls, name: str, values: Iterable[float], threshold: float) -> Self:
        """That the largest of some numbers is ≤ `threshold`."""
        return cls(name, worst(values), "≤", threshold)

    @classmethod
    def at_least(cls, name: str, values: Iterable[float], threshold: float) -> Self:
        """That the smallest of some numbers is ≥ `threshold`."""
        return cls(name, least(values), "≥", threshold)

    @property
    def passed(self) -> bool:
        """Whether the relation holds."""
        return _HOLDS[self.relation](self.measured, self.threshold)


def worst(values: Iterable[float]) -> float:
    """The largest of some numbers, NaN if one of them is."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def least(values: Iterable[float]) -> float:
    """The smallest of some numbers, NaN if one of them is."""
    return -worst(-value for value in values)


@dataclass(frozen=True)
class Result:
    """What a run measured.

    Args:
        checks: the claim holds when all of them pass.
        tables: the figures in words and numbers.
        figures: the data of the figures.
        records: what was measured, in full, one JSON object a line of the trace.
        notes: what the reader must know: choices that are ours, departures from the paper.
    """

    checks: tuple[Check, ...]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    records: tuple[Mapping[str, object], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there was one."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Settings:
    """What the user may choose of a run.

    Args:
        quick: seconds instead of minutes, with fewer repetitions (False).
        seeds: number of repetitions; None is the claim's own number (None).
        first_seed: the seeds are `first_seed`, `first_seed` + 1, … (0).
        device: where to compute, as torch names it; a claim on times or on exact decompositions may
            stay on the CPU ("cpu").
    """

    quick: bool = False
    seeds: int | None = None
    first_seed: int = 0
    device: str = "cpu"

    def seed_range(self, full: int, quick: int) -> range:
        """The seeds of the run, of which the claim wants `full`, or `quick` when that is asked."""
        count = self.seeds or (quick if self.quick else full)
        return range(self.first_seed, self.first_seed + count)


class Progress(Protocol):
    """Told by a run how far it is."""

    def begin(self, total: int, unit: str) -> None:
        """There are `total` units of work, of about equal time, called `unit` in the plural."""
        ...

    def advance(self, amount: int, stage: str) -> None:
        """Another `amount` units are done, the last ones in `stage`."""
        ...


class Silent:
    """The progress that nobody watches."""

    def begin(self, total: int, unit: str) -> None:
        """Say nothing."""

    def advance(self, amount: int, stage: str) -> None:
        """Say nothing."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: on small matrices, threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Claim:
    """One claim of the paper and how it is checked.

    Args:
        id: what `nucleon reproduce` calls it; the name of its file, with hyphens.
        title: a few words.
        statement: the claim in one sentence.
        place: where the paper makes it.
        tolerance: when it counts as reproduced, in one sentence.
        run: measures, and returns the result; determined by the settings.
        seconds: about how long a run takes on two cores.
        quick_seconds: the same with `quick`.
        alone: it measures time, so nothing else may run beside it (False).
    """

    id: str
    title: str
    statement: str
    place: str
    tolerance: str
    run: Callable[[Settings, Progress], Result] = field(repr=False)
    seconds: float
    quick_seconds: float
    alone: bool = False

    def expected(self, quick: bool) -> float:
        """About how many seconds a run takes."""
        return self.quick_seconds if quick else self.seconds
