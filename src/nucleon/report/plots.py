"""Figures as SVG and PNG: light, safe for colour-blind readers, legible at the width of a page."""

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from nucleon.claims import Figure, Panel, Series


class Look(NamedTuple):
    """Colour, dash and marker of a series, distinct for every colour vision."""

    colour: str
    dash: tuple[float, ...]
    """Lengths of dashes and gaps, in widths of the line; empty for a solid line."""
    marker: str


# Okabe and Ito's colours, each with its own dash and marker.
STYLES = (
    Look("#D55E00", (), "o"),
    Look("#E69F00", (1.2, 1.2), "v"),
    Look("#009E73", (4, 1.5), "s"),
    Look("#CC79A7", (5, 1.5, 1.2, 1.5), "D"),
    Look("#0072B2", (), "^"),
    Look("#56B4E9", (2.5, 1.2), "P"),
    Look("#000000", (1, 2), "X"),
)
INK, FAINT = "#22262B", "#E3E6EA"
LOOK: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same figure everywhere
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9AA1A9",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": "#5B636C",
    "ytick.color": "#5B636C",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "text.parse_math": False,  # names may contain dollars
}
WIDTH, PANEL_HEIGHT, HEADING = 9.0, 2.9, 0.85  # inches
KEY, LETTER, KEY_HEIGHT = 0.6, 0.075, 0.21  # inches of the legend: a key, a letter, a row
DPI = 160
ABOUT: dict[str, Any] = {"Date": None, "Creator": "nucleon"}


def draw(figure: Figure, folder: Path) -> tuple[Path, Path]:
    """Write `figure` into `folder` as SVG and PNG; the same data give the same bytes."""
    svg, png = folder / f"{figure.name}.svg", folder / f"{figure.name}.png"
    with mpl.rc_context({**LOOK, "svg.hashsalt": figure.name}):
        canvas = _canvas(figure)
        canvas.savefig(svg, metadata=ABOUT)
        canvas.savefig(png, dpi=DPI, metadata={"Software": "nucleon"})
    return svg, png


def _canvas(figure: Figure) -> Canvas:
    looks = {(s.name, s.style): None for panel in figure.panels for s in panel.series}
    longest = max((len(name) for name, _ in looks), default=0)
    keys = max(1, min(len(looks), int(WIDTH / (LETTER * longest + KEY))))
    heading = HEADING + KEY_HEIGHT * (-(-len(looks) // keys) - 1)
    columns = min(2, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    height = rows * PANEL_HEIGHT + heading
    panels = (0, 0, 1, 1 - heading / height)
    layout = ConstrainedLayoutEngine(rect=panels, hspace=0.06, wspace=0.04)
    canvas = Canvas(figsize=(WIDTH, height), layout=layout)
    FigureCanvasAgg(canvas)  # a canvas of its own: no global state, no window, safe in threads
    shared = figure.shared_axes
    axes = canvas.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).flatten()
    lines = dict[tuple[str, int], Line2D]()
    for panel, axis in zip(figure.panels, axes, strict=False):
        lines |= _draw_panel(panel, axis)
        if shared:
            axis.label_outer()
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    canvas.text(0.012, 1 - 0.1 / height, figure.title, weight="bold", size=12.5, va="top")
    canvas.legend(
        [lines[look] for look in looks],
        [name for name, _ in looks],
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.38 / height),
        ncols=keys,
        handlelength=2.2,
        columnspacing=1.6,
    )
    return canvas


def _draw_panel(panel: Panel, axis: Axes) -> dict[tuple[str, int], Line2D]:
    """Draw a panel; return the line of each name and style, for the legend."""
    lines = {(s.name, s.style): _draw_series(s, axis, panel.marked) for s in panel.series}
    axis.set_title(panel.title, loc="left", size=10.5)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.set_xscale(panel.x_scale)
    axis.set_yscale(panel.y_scale)
    axis.margins(x=0.03 if panel.marked else 0.01)
    if panel.y_scale == "log":
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_locator(NullLocator())
    if panel.x_scale == "log":
        points = sorted({x for series in panel.series for x in series.x})
        axis.xaxis.set_major_locator(FixedLocator(points) if len(points) < 7 else LogLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
    return lines


def _draw_series(series: Series, axis: Axes, marked: bool) -> Line2D:
    look = STYLES[series.style % len(STYLES)]
    if series.low is not None and series.high is not None:
        axis.fill_between(series.x, series.low, series.high, color=look.colour, alpha=0.13, lw=0)
    markers = marked or len(series.x) == 1  # a line through one point is invisible
    (line,) = axis.plot(
        series.x,
        series.y,
        color=look.colour,
        linestyle=(0, look.dash) if look.dash else "solid",
        linewidth=1.5,
        label=series.name,
        marker=look.marker if markers else None,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )
    return line
