"""Results of `step.py --json` as Markdown tables and as one picture.

    python benchmarks/step_report.py step.json                    # the tables
    python benchmarks/step_report.py step.json --plot step.png    # and the picture

"Others" are the Muons of other people; the fastest of them is the measure of ours.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OURS = ("Muon", "Leon", "Pion")  # what their names begin with
NOT_A_MUON = "torch AdamW"
KINDS = {
    "milliseconds": "called",
    "graph_milliseconds": "replayed as a CUDA graph, where a method can be captured",
}
COLUMNS = {
    "graph_milliseconds": ("as a graph, ms", ".3g"),
    "peak_mib": ("memory of a step, MiB", ".0f"),
    "error": ("error", ".2g"),
    "norm": ("largest norm", ".3f"),
}
"""Titles and formats of the columns of one result."""

Result = dict[str, Any]


def fastest(times: dict[str, float]) -> tuple[str, float]:
    """Return the fastest of the others."""
    others = {name: t for name, t in times.items() if not name.startswith((*OURS, NOT_A_MUON))}
    return min(others.items(), key=lambda item: item[1], default=("none", math.nan))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(results: list[Result], key: str) -> str:
    """Return a line for every result: ours, the fastest other, torch's Muon, and the ratios."""
    rows: list[list[str]] = []
    for result in results:
        times: dict[str, float] = result[key]
        peer, least = fastest(times)
        leon, muon, torchs = (times.get(name, math.nan) for name in ("Leon", "Muon", "torch Muon"))
        values = (leon, muon, torchs, leon / least, muon / least, leon / torchs)
        cells = [f"{value:.3g}" for value in values[:3]] + [f"{value:.2f}" for value in values[3:]]
        cells.insert(2, f"{least:.3g} ({peer})")
        rows.append([label(result), *cells])
    head = ("", "Leon, ms", "Muon, ms", "fastest other, ms", "torch Muon, ms")
    return table((*head, "Leon / fastest", "Muon / fastest", "Leon / torch"), rows)


def methods(result: Result) -> str:
    """Return a line for every method of one result, with the columns that it has figures for."""
    columns = {key: column for key, column in COLUMNS.items() if result.get(key)}
    rows: list[list[str]] = []
    for name, time in result["milliseconds"].items():
        row = [name, f"{time:.3g}"]
        for key, (_, style) in columns.items():
            found = result[key]
            row.append(f"{found[name]:{style}}" if name in found else "")
        rows.append(row)
    return table((label(result), "called, ms", *(title for title, _ in columns.values())), rows)


def label(result: Result) -> str:
    if "set" in result:
        return result["set"]
    count, m, n = result["stack"]
    return f"{count}×{m}×{n}"


def sorts(results: list[Result]) -> dict[str, list[Result]]:
    """Return whole sets, smallest first, single shapes of a set, and bare directions."""
    whole = [r for r in results if "×" not in r.get("set", "×")]
    return {
        "Whole steps": sorted(whole, key=lambda r: sum(map(math.prod, r["shapes"]))),
        "Steps, shape by shape": [r for r in results if "×" in r.get("set", "")],
        "Bare directions": [r for r in results if "stack" in r],
    }


def plot(results: list[Result], facts: dict[str, Any], target: Path) -> None:
    """Draw a panel for each whole set, a line for each method, fastest first."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    wide = min(2, len(results))
    high = -(-len(results) // wide)
    most = max(len(r["milliseconds"]) for r in results)
    size = (6 * wide, 0.9 + high * (0.8 + 0.27 * most))
    chart, axes = plt.subplots(high, wide, figsize=size, squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        called, graphs = result["milliseconds"], result.get("graph_milliseconds") or {}
        names = sorted(called, key=lambda n: called[n])
        colors = ["C0" if name.startswith(OURS) else "0.35" for name in names]
        axis.axvline(fastest(called)[1], color="0.6", linewidth=1, zorder=0)
        for y, (name, color) in enumerate(zip(names, colors, strict=True)):
            both = [called[name]]
            if name in graphs:
                both.append(graphs[name])
                axis.plot(graphs[name], y, "o", markerfacecolor="white", color=color, zorder=3)
            axis.plot(both, [y] * len(both), color=color, linewidth=1)
            axis.plot(called[name], y, "o", color=color)
            axis.annotate(f"{called[name]:.3g}", (max(both), y), (7, 0), fontsize=8, va="center",
                          color=color, textcoords="offset points",
                          bbox={"fc": "white", "lw": 0, "pad": 1})  # fmt: skip
        axis.set_yticks(range(len(names)), names, fontsize=8)
        for text, color in zip(axis.get_yticklabels(), colors, strict=True):
            text.set_color(color)
        axis.set(xscale="log", title=label(result), ylim=(len(names) - 0.5, -0.5))
        axis.margins(x=0.12)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[: len(results)][-wide:]:  # the lowest of each column
        axis.set_xlabel("milliseconds a step", fontsize=9)
    title = f"{facts['device']}, torch {facts['torch']}, {facts['dtype']} weights\n"
    legend = "● called   ○ replayed as a CUDA graph   │ the fastest other Muon, called"
    chart.suptitle(title + legend, fontsize=10)
    chart.tight_layout()
    chart.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("json", type=Path, nargs="+", help="of one machine; sets may be divided")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    options = parser.parse_args()
    files = [json.loads(path.read_text()) for path in options.json]
    for figures in files:
        print(", ".join(f"{key} {value}" for key, value in figures["environment"].items()))
    every = [result for figures in files for result in figures["results"]]
    for title, results in sorts(every).items():
        for key, kind in KINDS.items():
            if timed := [r for r in results if r.get(key)]:
                print(f"\n{title}, {kind}\n\n{summary(timed, key)}")
        for result in results:
            print(f"\n{methods(result)}")
    if options.plot:
        plot(sorts(every)["Whole steps"], files[0]["environment"], options.plot)


if __name__ == "__main__":
    main()
