"""`nucleon search`: the stream that brings a learner closest to its bound, kept as a small file."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich import box
from rich.markup import escape
from rich.table import Table as Grid

from nucleon.adversary import Build, Searched
from nucleon.adversary import search as search_worst
from nucleon.cli.console import (
    AsJson,
    Config,
    Debug,
    console,
    hinting,
    matrix_shape,
    plain_errors,
    print_json,
    progress,
)
from nucleon.cli.play import learner_of
from nucleon.experiments.base import one_thread
from nucleon.streams import WorstCase

LEARNERS: tuple[Searched, ...] = get_args(Searched)


def search(
    learners: Annotated[
        list[str],
        typer.Argument(
            metavar="LEARNER",
            help="By name, as faml, ftrl or ftpl, or as `nucleon play` takes them: "
            "gbpa:potential=mine.py:Smooth.",
            autocompletion=lambda: list(LEARNERS),
        ),
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the matrices, as 2x4; repeatable. 4x2 is the same game.", show_default="2x4"
        ),
    ] = None,
    rounds: Annotated[
        list[int] | None,
        typer.Option(min=2, help="T, of the stream; repeatable.", show_default="100"),
    ] = None,
    starts: Annotated[int, typer.Option(min=1, help="Of the ascent, in one batch.")] = 8,
    steps: Annotated[int, typer.Option(min=0, help="Of the ascent.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the starts.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the files.")] = Path("worst"),
    config: Config = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Search for the worst stream of each learner, shape and T, by gradient ascent.

    The learner then plays what was found; regret over bound is that of the game. A file is replaced
    only by a stream with a larger ratio. Play one with `--stream worst:file=FILE`.

    For example:

        nucleon search faml ftrl --shape 2x2 --rounds 100
        nucleon search ftpl --shape 1x1 --rounds 30 --steps 400 --output found
        nucleon search gbpa:potential=mine.py:Smooth --rounds 30
        nucleon play faml --shape 2x2 --rounds 100 --stream worst:file=worst/faml-2x2-100.json
    """
    with plain_errors(debug), one_thread():
        sizes = [_wide(*matrix_shape(words)) for words in shape or ["2x4"]]
        lengths = dict.fromkeys(rounds or [100])
        points = list(product(dict.fromkeys(learners), dict.fromkeys(sizes), lengths))
        ascent = {"starts": starts, "steps": steps, "seed": seed}
        rows = list[tuple[WorstCase, Path, bool]]()
        with progress("search") as bar:
            bar.begin(len(points) * max(steps, 1), "steps")
            for name, size, length in points:
                stage = f"{name}, {size[0]}×{size[1]}, T = {length}"

                def tell(step: int, ratio: float, stage: str = stage) -> None:
                    bar.advance(1, f"{stage}: {ratio:.4f}")

                learner = _learner(name)
                with hinting("see `nucleon list learners`", before=f"{name}: "):
                    case = search_worst(learner, size, length, name=name, on_step=tell, **ascent)
                rows.append((case, *_keep(case, output)))
        if as_json:
            print_json({"streams": [_plain(*row) for row in rows]})
            return
        console().print(_grid(rows))


def _wide(rows: int, columns: int) -> tuple[int, int]:
    """The shape with its short side first: learners transpose tall matrices."""
    return min(rows, columns), max(rows, columns)


def _learner(words: str) -> Searched | Build:
    """What builds the learner; the three of the kept streams as they were searched against."""
    for name in LEARNERS:
        if words == name:
            return name
    fixed = {"dtype": torch.float64, "radius": 1.0, "gradient_bound": 1.0}

    def build(shape: tuple[int, ...], seed: int) -> Any:
        return learner_of(words, {"shape": shape, "seed": seed, **fixed})

    return build


def _keep(case: WorstCase, folder: Path) -> tuple[Path, bool]:
    """Write the stream unless the folder has a worse one; its path, and whether it was written."""
    path = folder / case.file_name
    if path.exists() and WorstCase.load(path).ratio >= case.ratio:
        return path, False
    return case.save(folder), True


def _grid(rows: list[tuple[WorstCase, Path, bool]]) -> Grid:
    grid = Grid("learner", "shape", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("T", "regret/bound"):
        grid.add_column(column, justify="right")
    grid.add_column("file")
    for case, path, written in rows:
        ratio = f"{case.ratio:.4f}" + (f" ± {case.margin:.4f}" if case.margin else "")
        place = str(path) if written else f"{path} (kept: its ratio is larger)"
        size = "{}×{}".format(*case.shape)
        grid.add_row(case.learner, size, str(case.rounds), ratio, escape(place))
    return grid


def _plain(case: WorstCase, path: Path, written: bool) -> dict[str, object]:
    return {
        "learner": case.learner,
        "shape": list(case.shape),
        "rounds": case.rounds,
        "ratio": case.ratio,
        "margin": case.margin,
        "file": str(path),
        "written": written,
    }
