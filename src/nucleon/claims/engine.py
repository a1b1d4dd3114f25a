"""Claims as data: the statement of a claim, its measurement, and the result of a run.

A claim is one file with one `CLAIM`. Its `measure` is a generator: it accepts a `Run` and yields,
in any order, each `Check`, `Table`, `Figure` and note, which is a string.

    def measure(run: Run) -> Iterator[Item]:
        games = play(run, GRID)                                   # rows, a `Game` each
        yield at_most("largest regret/bound", games.column("ratio"), 1.0)
        yield games.grid("Regret over bound", "stream", "learner", "ratio")
        yield from against_oracle(gbpa_games(["FAML"], [SHAPE]))  # a few rounds beside the oracle

`Run.each` measures any other cases and returns a row for each. Rows enter the trace of the run by
themselves, without the fields whose name begins with an underscore. A pair of settings is
(full, quick), and `run.pick` chooses.

A function of the library is looked up when the claim runs (`theory.faml_bound` inside a function
or a lambda), so that a fault planted in a public name reaches the claim.
"""

import inspect
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from nucleon.claims.shown import Cell, Figure, Series, Table

Relation = Literal["<", "≤", "≥", ">"]
_HOLDS: Mapping[Relation, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "≤": operator.le,
    "≥": operator.ge,
    ">": operator.gt,
}
T = TypeVar("T")

# ---------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Check:
    """A comparison `measured relation threshold`, which fails for a NaN."""

    name: str
    measured: float
    relation: Relation
    threshold: float

    @property
    def passed(self) -> bool:
        """Return whether the relation holds."""
        return _HOLDS[self.relation](self.measured, self.threshold)


Values = float | Tensor | Iterable[float | Tensor]
"""Numbers to be checked: one, a tensor of them, or several of either."""


def at_most(name: str, values: Values, limit: float) -> Check:
    """Check that the largest of the values is ≤ `limit`."""
    return Check(name, worst(numbers(values)), "≤", limit)


def below(name: str, values: Values, limit: float) -> Check:
    """Check that the largest of the values is < `limit`."""
    return Check(name, worst(numbers(values)), "<", limit)


def at_least(name: str, values: Values, limit: float) -> Check:
    """Check that the smallest of the values is ≥ `limit`."""
    return Check(name, least(numbers(values)), "≥", limit)


def above(name: str, values: Values, limit: float) -> Check:
    """Check that the smallest of the values is > `limit`."""
    return Check(name, least(numbers(values)), ">", limit)


def numbers(values: Values) -> list[float]:
    """Return the values in one list."""
    if isinstance(values, Tensor):
        return values.double().flatten().tolist()
    if isinstance(values, Iterable):
        return [number for value in values for number in numbers(value)]
    return [float(values)]


def worst(values: Iterable[float]) -> float:
    """Return the largest of some numbers, NaN if one of them is."""
    every = list(values)
    return math.nan if any(map(math.isnan, every)) else max(every)


def least(values: Iterable[float]) -> float:
    """Return the smallest of some numbers, NaN if one of them is."""
    return -worst(-value for value in values)


# ---------------------------------------------------------------------- rows


class Row(SimpleNamespace):
    """A case and what was measured of it, by name."""

    def record(self) -> dict[str, object]:
        """Return the fields that JSON can hold, for the trace."""
        plain = dict[str, object]()
        for name, value in vars(self).items():
            with suppress(TypeError):
                if name[0] != "_":
                    plain[name] = json.loads(json.dumps(value, default=Tensor.tolist))
        return plain


Shown = str | Callable[[Any], Any]
"""A column of a table: the name of a field, or a function of the row."""


class Rows(list[Any]):
    """Rows of one kind."""

    def line(self, name: str, x: Shown, y: Shown, style: int = 0) -> Series:
        """Return one column against another."""
        return Series(name, self.column(x), self.column(y), style=style)

    def where(self, test: Callable[[Any], bool] | None = None, /, **match: object) -> "Rows":
        """Return the rows whose fields have these values, and for which the test is true."""
        return Rows(
            row
            for row in self
            if (test is None or test(row))
            and all(getattr(row, name) == value for name, value in match.items())
        )

    def one(self, **match: object) -> Any:
        """Return the only row whose fields have these values."""
        (row,) = self.where(**match)
        return row

    def column(self, shown: Shown) -> list[Any]:
        """Return a field of every row."""
        return [_shown(shown)(row) for row in self]

    def different(self, name: str) -> list[Any]:
        """Return the values of a field, each once, in the order of the rows."""
        return list(dict.fromkeys(self.column(name)))

    def listing(self, title: str, columns: Mapping[str, Shown]) -> Table:
        """Return a table with a line for each row."""
        cells = [_shown(shown) for shown in columns.values()]
        lines = (tuple(_cell(cell(row)) for cell in cells) for row in self)
        return Table(title, tuple(columns), tuple(lines))

    def grid(self, title: str, rows: str, columns: str, value: Shown) -> Table:
        """Return a table of two fields, with the value of the row that has both in its cell."""
        across, cell = self.different(columns), _shown(value)
        lines = list[tuple[Cell, ...]]()
        for down in self.different(rows):
            line = self.where(**{rows: down})
            cells = (line.where(**{columns: at}) for at in across)
            lines.append((label(down), *(_cell(cell(c[0])) if c else "" for c in cells)))
        return Table(title, (rows, *map(label, across)), tuple(lines))


def _shown(shown: Shown) -> Callable[[Any], Any]:
    return operator.attrgetter(shown) if isinstance(shown, str) else shown


def _cell(value: Any) -> Cell:
    if isinstance(value, Tensor):
        return value.double().mean().item()
    return value if isinstance(value, float | int) else label(value)


def label(value: object) -> str:
    """Return a shape as m×n, a number without trailing zeros, and anything else as text."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "×".join(map(str, value[-2:]))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return str(value)


def stage_of(case: Mapping[str, Any]) -> str:
    """Return the names, numbers and shapes of a case in words."""
    return ", ".join(label(v) for v in case.values() if isinstance(v, str | int | float | tuple))


def cases(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Return every combination of the values of the axes, by name."""
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Args:
        checks: comparisons, all of which pass where the claim is reproduced.
        tables: rows of words and numbers.
        figures: panels of series.
        records: measured rows, each a JSON object and a line of the trace.
        notes: choices of this library and departures from the paper.
    """

    checks: tuple[Check, ...]
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    records: tuple[Mapping[str, object], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether every check passed, and there was one."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Settings:
    """Options of a run.

    Args:
        quick: seconds instead of minutes, with fewer repetitions (False).
        seeds: number of repetitions; None is the claim's own number (None).
        first_seed: the seeds are `first_seed`, `first_seed` + 1, … (0).
    """

    quick: bool = False
    seeds: int | None = None
    first_seed: int = 0


class Progress:
    """Listener to the progress of a run; this class shows nothing."""

    def begin(self, total: int) -> None:
        """Begin a stage of `total` units of about equal time."""

    def advance(self, amount: int, stage: str) -> None:
        """Note that another `amount` units are done, the last ones in `stage`."""


@dataclass
class Run:
    """The settings, the progress and the rows of one run.

    Args:
        settings: options of the run.
        progress: listener that is notified of every case.
        records: trace so far, a JSON object for each measured row.
    """

    settings: Settings
    progress: Progress = field(default_factory=Progress)
    records: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    @property
    def quick(self) -> bool:
        """Return whether the run takes seconds instead of minutes."""
        return self.settings.quick

    @property
    def seed(self) -> int:
        """Return the first seed."""
        return self.settings.first_seed

    def pick(self, pair: tuple[T, T]) -> T:
        """Return the first of a pair in a full run, the second in a quick one."""
        return pair[self.quick]

    def seeds(self, pair: tuple[int, int]) -> range:
        """Return the seeds, as many as the user asks for, else as the pair says."""
        return range(self.seed, self.seed + (self.settings.seeds or self.pick(pair)))

    def each(
        self,
        points: Iterable[Mapping[str, Any]],
        measure: Callable[..., Mapping[str, Any]],
        kind: type[Row] = Row,
    ) -> Rows:
        """Measure every case, a mapping of names, and return it with the measured fields.

        A name that is no parameter of `measure` labels the row alone. `kind` is the class of rows.
        A row enters the trace if JSON can hold at least one of its measured fields.
        """
        every, rows, accepted = list(points), Rows(), inspect.signature(measure).parameters
        self.progress.begin(len(every))
        for point in every:
            options = {n: v for n, v in point.items() if n in accepted}
            row = kind(**{**point, **measure(**options)})
            rows.append(row)
            if row.record().keys() - point.keys():
                self.keep(Rows([row]))
            self.progress.advance(1, stage_of(point))
        return rows

    def keep(self, rows: Rows) -> Rows:
        """Append the rows to the trace, and return them."""
        self.records += [row.record() for row in rows]
        return rows


Item = Check | Table | Figure | str
"""An item that a claim yields; each paragraph of a string is a note."""
ItemT = TypeVar("ItemT", Check, Table, Figure, str)


@dataclass(frozen=True)
class Claim:
    """One claim of the paper and how it is checked.

    Args:
        id: the argument of `nucleon reproduce`; the name of its file, with hyphens.
        title: a few words.
        statement: the claim in one sentence.
        place: where the paper makes it.
        tolerance: when it counts as reproduced, in one sentence.
        measure: yields checks, tables, figures and notes, determined by the settings.
        seconds: about how long a run takes on two cores, (full, quick).
        alone: it measures time, so nothing else may run beside it (False).
    """

    id: str
    title: str
    statement: str
    place: str
    tolerance: str
    measure: Callable[[Run], Iterator[Item]] = field(repr=False)
    seconds: tuple[float, float]
    alone: bool = False

    def run(self, settings: Settings, progress: Progress | None = None) -> Result:
        """Measure the claim on one thread."""
        run, threads = Run(settings, progress or Progress()), torch.get_num_threads()
        torch.set_num_threads(1)  # on small matrices, threads cost more than they bring
        try:
            items = list(self.measure(run))
        finally:
            torch.set_num_threads(threads)

        for item in items:
            if not isinstance(item, Item):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{self.id} yields {item!r}; write `yield from` for several items")

        def of(kind: type[ItemT]) -> tuple[ItemT, ...]:
            return tuple(item for item in items if isinstance(item, kind))

        notes = (" ".join(part.split()) for text in of(str) for part in text.split("\n\n"))
        return Result(of(Check), of(Table), of(Figure), tuple(run.records), tuple(notes))
