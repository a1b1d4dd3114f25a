"""What `step.py --json` has written, as Markdown tables and as one picture.

    python benchmarks/step_report.py step.json              # the tables
    python benchmarks/step_report.py step.json step.png     # and the picture

"Others" are the Muons of other people; the fastest of them is the measure of ours.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OURS = ("Muon", "Leon", "Pion k=1", "Pion k=4")
NOT_A_MUON = "torch AdamW"
KINDS = {"milliseconds": "called", "graph_milliseconds": "replayed as a CUDA graph"}

Result = dict[str, Any]


def fastest(times: dict[str, float]) -> tuple[str, float]:
    """The fastest of the others."""
    others = {name: t for name, t in times.items() if name not in (*OURS, NOT_A_MUON)}
    return min(others.items(), key=lambda item: item[1])


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(results: list[Result], key: str) -> str:
    """A line for every result: ours, the fastest other, torch's Muon, and the ratios."""
    rows: list[list[str]] = []
    for result in results:
        times: dict[str, float] = result[key]
        peer, least = fastest(times)
        torchs = times["torch Muon"]
        rows.append(
            [
                label(result),
                *(f"{times[name]:.3g}" for name in ("Leon", "Muon")),
                f"{least:.3g} ({peer})",
                f"{torchs:.3g}",
                f"**{times['Leon'] / least:.2f}**",
                f"{times['Muon'] / least:.2f}",
                f"{times['Leon'] / torchs:.2f}",
            ]
        )
    head = ("", "Leon, ms", "Muon, ms", "fastest other, ms", "torch Muon, ms")
    return table((*head, "Leon / fastest", "Muon / fastest", "Leon / torch"), rows)


def methods(result: Result) -> str:
    """A line for every method of one result."""
    rows: list[list[str]] = []
    for name, time in result["milliseconds"].items():
        rest = [
            f"{found[name]:{style}}" if name in (found := result.get(key) or {}) else ""
            for key, style in MORE.items()
        ]
        rows.append([name, f"{time:.3g}", *rest])
    return table((label(result), "called, ms", *TITLES.values()), rows)


MORE = {"graph_milliseconds": ".3g", "peak_mib": ".0f", "error": ".2g", "norm": ".3f"}
TITLES = {"graph_milliseconds": "as a graph, ms", "peak_mib": "memory of a step, MiB",
          "error": "error", "norm": "largest norm"}  # fmt: skip


def label(result: Result) -> str:
    if "set" in result:
        return result["set"]
    count, m, n = result["stack"]
    return f"{count}×{m}×{n}"


def sorts(results: list[Result]) -> dict[str, list[Result]]:
    """Whole sets, single shapes of a set, bare directions."""
    return {
        "Whole steps": [r for r in results if "×" not in r.get("set", "×")],
        "Steps, shape by shape": [r for r in results if "×" in r.get("set", "")],
        "Bare directions": [r for r in results if "stack" in r],
    }


def plot(figures: dict[str, Any], target: Path) -> None:
    """The steps of the whole sets, over that of the fastest of the other Muons."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    results = sorts(figures["results"])["Whole steps"]
    kinds = {key: title for key, title in KINDS.items() if any(r.get(key) for r in results)}
    names = list(dict.fromkeys(n for r in results for n in r["milliseconds"]))
    size = (11, 1.6 + len(kinds) * (1.2 + 0.9 * len(results)))
    chart, axes = plt.subplots(len(kinds), figsize=size, squeeze=False, sharex=True)
    for axis, (key, title) in zip(axes[:, 0], kinds.items(), strict=True):
        axis.axvline(1.0, color="0.5", linewidth=1)
        for y, result in enumerate(results):
            times = result[key]
            _, least = fastest(times)
            axis.plot([min(times.values()) / least, max(times.values()) / least], [y, y], "0.9")
            for index, name in enumerate(sorted(times, key=lambda n: times[n])):
                marker = "o" if name in OURS else "D"
                color, place = f"C{names.index(name)}", (times[name] / least, y)
                axis.plot(*place, marker, color=color, markersize=9, clip_on=False)
                drop = -15 if index % 2 else 9
                axis.annotate(f"{times[name]:.3g}", place, (0, drop), ha="center", fontsize=8,
                              textcoords="offset points")  # fmt: skip
        axis.set_yticks(range(len(results)), [r["set"] for r in results])
        axis.set(xscale="log", title=f"A step, {title}", ylim=(len(results) - 0.5, -0.5))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("time over the fastest other Muon's; the labels are milliseconds")
    handles = [
        Line2D([], [], marker="o" if name in OURS else "D", color=f"C{i}", linestyle="")
        for i, name in enumerate(names)
    ]
    chart.legend(handles, names, loc="lower center", ncols=5, fontsize="small")
    facts = figures["environment"]
    chart.suptitle(f"{facts['device']}, torch {facts['torch']}, {facts['dtype']} weights")
    chart.tight_layout(rect=(0, 0.5 / size[1], 1, 1))
    chart.savefig(target, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path, nargs="?")
    options = parser.parse_args()
    figures = json.loads(options.json.read_text())
    print(", ".join(f"{key} {value}" for key, value in figures["environment"].items()))
    for title, results in sorts(figures["results"]).items():
        for key, kind in KINDS.items():
            if timed := [r for r in results if r.get(key)]:
                print(f"\n{title}, {kind}\n\n{summary(timed, key)}")
        for result in results:
            print(f"\n{methods(result)}")
    if options.png:
        plot(figures, options.png)


if __name__ == "__main__":
    main()
