"""Results of `models.py --json` as the Markdown tables of the documentation.

    python benchmarks/models_report.py docs/figures/models/*.json

A state is counted: float32 moments of the matrices and M̂ of their short sides, two of the rest.
The other figures are those of the files, smallest model first.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from step_report import table

LEON, MUON, TORCHS, ADAMW = "Leon.for_model", "Muon.for_model", "torch Muon", "torch AdamW"
BESIDE = " + fused AdamW"

Result = Mapping[str, Any]
Columns = Mapping[str, Callable[[Result], str]]


def label(result: Result) -> str:
    """Return the model's name, its unusual settings, and the number of trained parameters."""
    dtypes = {name.removeprefix("torch.") for name in result["dtypes"]} - {"float32"}
    layout = ["channels last"] if result["channels_last"] else []
    tiny = ["tiny"] if result["tiny"] else []
    return ", ".join([result["model"], *layout, *sorted(dtypes), *tiny, millions(result)])


def millions(result: Result) -> str:
    return f"{result['trained'] / 1e6:,.0f} M"


def digits(value: float) -> str:
    """Return a number with three digits, and all before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def of(
    method: str, key: str = "milliseconds", style: Callable[[float], str] = digits
) -> Callable[[Result], str]:
    """Return a column: a figure of one method."""
    return lambda result: style(result["methods"][method][key])


def fastest(result: Result) -> str:
    """Return the fastest other Muon that was measured."""
    return result["ratios"]["fastest other Muon"]["of"]


def fastest_of(key: str, style: Callable[[float], str] = digits) -> Callable[[Result], str]:
    """Return a column: a figure of the fastest other Muon, with its name."""

    def cell(result: Result) -> str:
        name = fastest(result)
        return f"{style(result['methods'][name][key])} ({name.removesuffix(BESIDE)})"

    return cell


def ratio(which: str) -> Callable[[Result], str]:
    """Return a column: Leon's time over that of one of `models.REQUIRED`."""
    return lambda result: f"{result['ratios'][which]['ratio']:.2f}"


def spread(result: Result) -> str:
    found = result["methods"][LEON]
    return f"{digits(found['least'])} to {digits(found['most'])}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def state_bytes(result: Result) -> dict[str, int]:
    """Return the bytes of state between steps of each method, in float32."""
    matrices = sum(count * m * n for count, m, n in result["matrices"])
    grams = sum(count * min(m, n) ** 2 for count, m, n in result["matrices"])
    rest = 2 * result["rest"]["entries"]
    return {
        LEON: 4 * (matrices + grams + rest),
        MUON: 4 * (matrices + rest),
        ADAMW: 8 * result["trained"],
    }


def state(method: str) -> Callable[[Result], str]:
    """Return a column: the MiB of a state."""
    return lambda result: whole(state_bytes(result)[method] / 2**20)


TIMES: Columns = {
    "ms per step": label,
    "Leon": of(LEON),
    "Muon": of(MUON),
    "fastest other Muon + AdamW": fastest_of("milliseconds"),
    "torch Muon + AdamW": of(TORCHS + BESIDE),
    "AdamW alone": of(ADAMW),
    "Leon's share": of(LEON, "share", lambda x: f"{x:.1%}"),
}
BATCHES: Columns = {
    "model": label,
    "batch": lambda result: result["batch"],
    "forward and backward, ms": lambda result: digits(result["forward_backward_milliseconds"]),
    "Leon, least to most": spread,
    "Leon / fastest other": ratio("fastest other Muon"),
    "Leon / same blocks": ratio("same blocks"),
}
MEMORY: Columns = {
    "MiB": label,
    "state: Leon": state(LEON),
    "state: Muon": state(MUON),
    "state: AdamW": state(ADAMW),
    "step: Leon": of(LEON, "mib", whole),
    "step: Muon": of(MUON, "mib", whole),
    "step: fastest other": fastest_of("mib", whole),
    "step: torch Muon": of(TORCHS + BESIDE, "mib", whole),
}
LAUNCHES: Columns = {
    "Leon": label,
    "launches": of(LEON, "launches", whole),
    "kernels": of(LEON, "kernels", whole),
    "their time, ms": of(LEON, "kernel_milliseconds"),
    "the step, ms": of(LEON),
    "launches of torch Muon + AdamW": of(TORCHS + BESIDE, "launches", whole),
}


def drawn(columns: Columns, results: Sequence[Result]) -> str:
    return table(columns, ([cell(result) for cell in columns.values()] for result in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("json", type=Path, nargs="+", help="of one machine")
    files = [json.loads(path.read_text()) for path in parser.parse_args().json]
    for stated in dict.fromkeys(
        ", ".join(f"{key} {value}" for key, value in figures["environment"].items())
        for figures in files
    ):
        print(stated)
    every = sorted((r for f in files for r in f["results"]), key=lambda r: r["trained"])
    on_device = [r for r in every if "mib" in r["methods"][LEON]]  # else nothing counts them
    for columns, results in (
        (TIMES, every), (BATCHES, every), (MEMORY, on_device), (LAUNCHES, on_device),
    ):  # fmt: skip
        if results:
            print(f"\n{drawn(columns, results)}")


if __name__ == "__main__":
    main()
