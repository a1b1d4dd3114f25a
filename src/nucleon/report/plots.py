"""Figures as SVG and PNG: light, safe for colour-blind readers, legible at the width of a page."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from nucleon.experiments.base import Figure, Panel, Series

# Okabe and Ito's colours, told apart with any colour vision, and each with its own dash and marker.
STYLES: tuple[tuple[str, str | tuple[int, tuple[float, ...]], str], ...] = (
    ("#D55E00", "solid", "o"),
    ("#E69F00", (0, (1.2, 1.2)), "v"),
    ("#009E73", (0, (4, 1.5)), "s"),
    ("#CC79A7", (0, (5, 1.5, 1.2, 1.5)), "D"),
    ("#0072B2", "solid", "^"),
    ("#56B4E9", (0, (2.5, 1.2)), "P"),
    ("#000000", (0, (1, 2)), "X"),
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
}
WIDTH, PANEL_HEIGHT, HEADING = 9.0, 2.9, 0.85  # inches
DPI = 160


def draw(figure: Figure, folder: Path) -> tuple[Path, Path]:
    """Write `figure` into `folder` as SVG and PNG; the same data give the same bytes."""
    svg, png = folder / f"{figure.name}.svg", folder / f"{figure.name}.png"
    with mpl.rc_context({**LOOK, "svg.hashsalt": figure.name}):
        canvas = _canvas(figure)
        canvas.savefig(svg, metadata={"Date": None, "Creator": "nucleon"})
        canvas.savefig(png, dpi=DPI, metadata={"Software": "nucleon"})
    return svg, png


def _canvas(figure: Figure) -> Canvas:
    columns = min(2, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    height = rows * PANEL_HEIGHT + HEADING
    room = (0, 0, 1, 1 - HEADING / height)
    layout = ConstrainedLayoutEngine(rect=room, hspace=0.06, wspace=0.04)
    canvas = Canvas(figsize=(WIDTH, height), layout=layout)
    FigureCanvasAgg(canvas)  # a canvas of its own: no global state, no window, safe in threads
    shared = figure.shared_axes
    axes = canvas.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).flatten()
    for panel, axis in zip(figure.panels, axes, strict=False):
        _draw_panel(panel, axis)
        if shared:
            axis.label_outer()
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    canvas.text(0.012, 1 - 0.1 / height, figure.title, weight="bold", size=12.5, va="top")
    handles, labels = axes[0].get_legend_handles_labels()
    canvas.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.38 / height),
        ncols=len(labels),
        handlelength=2.2,
        columnspacing=1.6,
    )
    return canvas


def _draw_panel(panel: Panel, axis: Axes) -> None:
    for series in panel.series:
        _draw_series(series, axis, panel.marked)
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
        axis.xaxis.set_major_locator(FixedLocator(points) if len(points) < 9 else LogLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_locator(NullLocator())


def _draw_series(series: Series, axis: Axes, marked: bool) -> None:
    colour, dash, marker = STYLES[series.style % len(STYLES)]
    if series.low is not None and series.high is not None:
        axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.13, lw=0)
    axis.plot(
        series.x,
        series.y,
        color=colour,
        linestyle=dash,
        linewidth=1.5,
        label=series.name,
        marker=marker if marked else None,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )
