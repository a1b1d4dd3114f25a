"""What a claim shows: tables, the data of figures, and records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from torch import Tensor

Scale = Literal["linear", "log"]
Cell = str | float
Item = TypeVar("Item")
Row = TypeVar("Row")
Column = TypeVar("Column")


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under a row of column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def listing(
        cls, title: str, items: Iterable[Item], columns: Mapping[str, Callable[[Item], Cell]]
    ) -> Self:
        """A row for each item, a column for each function of it."""
        rows = tuple(tuple(cell(item) for cell in columns.values()) for item in items)
        return cls(title, tuple(columns), rows)

    @classmethod
    def grid(
        cls,
        title: str,
        corner: str,
        rows: Mapping[str, Row],
        columns: Mapping[str, Column],
        cell: Callable[[Row, Column], Cell],
    ) -> Self:
        """A cell for each pair of a row and a column, which are shown under their names."""
        cells = tuple(
            (name, *(cell(row, c) for c in columns.values())) for name, row in rows.items()
        )
        return cls(title, (corner, *columns), cells)


@dataclass(frozen=True)
class Series:
    """A line y(x), with a band from `low` to `high` where given.

    Series of one `style` look alike in every panel and figure of a claim.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    style: int = 0

    @classmethod
    def spanning(cls, name: str, x: Sequence[float], values: Tensor, style: int = 0) -> Self:
        """The means of values, (points, repetitions), in a band that spans the repetitions."""
        mean, low, high = (v.tolist() for v in (values.mean(1), values.amin(1), values.amax(1)))
        return cls(name, x, mean, low, high, style)


@dataclass(frozen=True)
class Panel:
    """Series over the same axes; `marked` puts a marker on every point."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    marked: bool = False


def log_panel(title: str, labels: tuple[str, str], series: Iterable[Series]) -> Panel:
    """A panel with two logarithmic axes, labelled (x, y)."""
    return Panel(title, *labels, tuple(series), x_scale="log", y_scale="log")


def named(names: Iterable[str]) -> dict[str, str]:
    """Rows or columns of a grid that are their own names."""
    return {name: name for name in names}


def records(
    items: Iterable[Item], fields: Mapping[str, Callable[[Item], object]]
) -> tuple[dict[str, object], ...]:
    """One record for each item, a field for each function of it."""
    return tuple({name: field(item) for name, field in fields.items()} for item in items)


@dataclass(frozen=True)
class Figure:
    """Panels under one title and one legend; `name` becomes the name of the file.

    `shared_axes` gives all panels the same limits, so that they can be compared by eye.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    shared_axes: bool = False
