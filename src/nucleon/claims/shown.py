"""Tables and the data of figures: for a claim, a game or a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from torch import Tensor

Scale = Literal["linear", "log"]
Cell = str | float
STYLES = {"FTL": 0, "One-sided Shampoo": 1, "FTRL": 2, "FTPL": 3, "FAML": 4}
"""Style of each learner in every figure."""
BOUND, PRINTED = 5, 6
"""Styles of a bound, both broken lines."""


@dataclass(frozen=True)
class Table:
    """Rows of words and numbers under a row of column names."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


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
        """Return the means of values, (points, repetitions), in a band that spans them."""
        mean, low, high = (v.tolist() for v in (values.mean(1), values.amin(1), values.amax(1)))
        return cls(name, x, mean, low, high, style)


def level(name: str, x: Sequence[float], style: int = BOUND, value: float = 1.0) -> Series:
    """Return a horizontal line over the range of x."""
    return Series(name, [min(x), max(x)], [value, value], style=style)


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
    """Return a panel with two logarithmic axes, labelled (x, y)."""
    return Panel(title, *labels, tuple(series), x_scale="log", y_scale="log")


@dataclass(frozen=True)
class Figure:
    """Panels under one title and one legend; `name` becomes the name of the file.

    With `shared_axes` all panels have the same limits, so that they can be compared by eye.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    shared_axes: bool = False
