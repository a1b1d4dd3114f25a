"""`nucleon search`: the stream that brings a learner closest to its bound, kept as a small file."""

from pathlib import Path
from typing import Annotated, get_args

import typer
from rich import box
from rich.markup import escape
from rich.table import Table as Grid

from nucleon.adversary import Searched
from nucleon.adversary import search as search_worst
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Config,
    Debug,
    console,
    matrix_shape,
    plain_errors,
    print_json,
    progress,
)
from nucleon.experiments.base import one_thread
from nucleon.streams import WorstCase

LEARNERS: tuple[Searched, ...] = get_args(Searched)


def search(
    learners: Annotated[
        list[str],
        typer.Argument(
            metavar="LEARNER",
            help=f"One or more of {', '.join(LEARNERS)}.",
            autocompletion=lambda: list(LEARNERS),
        ),
    ],
    shape: Annotated[
        list[str] | None,
        typer.Option(help="Of the matrices, as 2x4; repeatable.", show_default="2x4"),
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
        nucleon play faml --shape 2x2 --rounds 100 --stream worst:file=worst/faml-2x2-100.json
    """
    with plain_errors(debug), one_thread():
        names: list[Searched] = [_known(name) for name in dict.fromkeys(learners)]
        shapes = [matrix_shape(words) for words in dict.fromkeys(shape or ["2x4"])]
        points: list[tuple[Searched, tuple[int, int], int]] = [
            (name, size, length)
            for name in names
            for size in shapes
            for length in dict.fromkeys(rounds or [100])
        ]
        rows = list[tuple[WorstCase, Path, bool]]()
        with progress("search") as bar:
            bar.begin(len(points) * max(steps, 1), "steps")
            for name, size, length in points:
                stage = f"{name}, {size[0]}×{size[1]}, T = {length}"

                def tell(step: int, ratio: float, stage: str = stage) -> None:
                    bar.advance(1, f"{stage}: {ratio:.4f}")

                options = {"starts": starts, "steps": steps, "seed": seed}
                case = search_worst(name, size, length, **options, on_step=tell)
                rows.append((case, *_keep(case, output)))
        if as_json:
            print_json({"streams": [_plain(*row) for row in rows]})
            return
        console().print(_grid(rows))


def _known(name: str) -> Searched:
    if name not in LEARNERS:
        raise CommandError(
            f"there is no search against {name!r}", f"name one of {', '.join(LEARNERS)}"
        )
    return name


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
