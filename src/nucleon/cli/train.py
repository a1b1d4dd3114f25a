"""`nucleon train`: any optimizer on digits or on a text, in a run that may be broken off."""

import math
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from nucleon import training
from nucleon._naming import is_address
from nucleon.cli.console import (
    AsJson,
    CommandError,
    Debug,
    columns,
    complain,
    console,
    explain,
    hinting,
    plain_errors,
    print_json,
    progress,
    setting,
    usable_device,
)
from nucleon.cli.trained import Diary, command, field_of, new_folder
from nucleon.optim.routing.routing import AUX_LR
from nucleon.training import Options, Recipe, Run, Summary, optimizer_names
from nucleon.training.data import Tokens
from nucleon.training.loop import Precision, Record, Schedule
from nucleon.training.run import Task

INTERRUPTED = 130
_NOT_OF_THE_RUN = {"output", "resume", "device", "compiled", "keep", "as_json", "debug"}
_FOR_TEXT = "for text"


def train(
    context: typer.Context,
    task: Annotated[Task, typer.Option(help="What to learn.")] = "digits",
    optimizer: Annotated[
        str,
        typer.Option(
            help=f"One of {', '.join(optimizer_names())}, or package.module:Class, or "
            f"file.py:Class, which runs that file; --resume wants these two repeated.",
            autocompletion=lambda: list(optimizer_names()),
        ),
    ] = "leon",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate; default: usual.", show_default=False)
    ] = None,
    aux_lr: Annotated[
        float | None,
        typer.Option(help=f"Of AdamW on what is no hidden matrix; {AUX_LR}.", show_default=False),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the optimizer; repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 300,
    batch: Annotated[int, typer.Option(help="Examples a batch.")] = 32,
    schedule: Annotated[Schedule, typer.Option(help="Of the rate after warm-up.")] = "constant",
    warmup: Annotated[int, typer.Option(help="Steps over which the rate rises.")] = 0,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradients; 0: any.")] = 0.0,
    accumulate: Annotated[int, typer.Option(help="Batches a step.")] = 1,
    precision: Annotated[Precision, typer.Option(help="bf16 is autocast.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of weights, batches and noise.")] = 0,
    width: Annotated[
        int | None, typer.Option(help="Of the layers; 64, text 128.", show_default=False)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="How many; 2, text 4.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text file or folder of them; default: Python's standard library.",
            show_default=False,
            rich_help_panel=_FOR_TEXT,
        ),
    ] = None,
    megabytes: Annotated[
        float, typer.Option(help="How much of it.", rich_help_panel=_FOR_TEXT)
    ] = 2.0,
    tokens: Annotated[
        Tokens, typer.Option(help="Characters or byte pairs.", rich_help_panel=_FOR_TEXT)
    ] = "char",
    vocabulary: Annotated[
        int, typer.Option("--vocab", help="Most tokens of bpe.", rich_help_panel=_FOR_TEXT)
    ] = 512,
    context_length: Annotated[
        int, typer.Option("--context", help="Tokens in a window.", rich_help_panel=_FOR_TEXT)
    ] = 128,
    heads: Annotated[int, typer.Option(help="Of attention.", rich_help_panel=_FOR_TEXT)] = 4,
    dropout: Annotated[
        float, typer.Option(help="In every block.", rich_help_panel=_FOR_TEXT)
    ] = 0.0,
    tied: Annotated[
        bool, typer.Option("--tied", help="The head is the embedding.", rich_help_panel=_FOR_TEXT)
    ] = False,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    evaluate_every: Annotated[int, typer.Option(help="Steps; 0: at the end.")] = 100,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: end.")] = 100,
    keep: Annotated[int, typer.Option(help="Newest checkpoints that stay.")] = 2,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run; default: a new one in runs/train."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of --output, with its options.")
    ] = False,
    device: Annotated[str, typer.Option(help="As torch names it.")] = "cpu",
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the model; default: on CUDA.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Train a small network: hidden matrices by the optimizer, the rest by AdamW.

    Ctrl-C saves and says how to go on. A run that was killed goes on from its last checkpoint, and
    on a CPU ends exactly as if it had not been. Exit code 0 at the end, 130 when interrupted, 2
    when the command could not do its work.

    For example:

        nucleon train --optimizer leon --lr 0.05 --schedule cosine
        nucleon train --task text --data novel.txt --tokens bpe --steps 1000 --output runs/novel
        nucleon train --resume --output runs/novel
        nucleon report runs/novel
    """
    with plain_errors(debug):
        place: dict[str, Any] = {
            "device": usable_device(device),
            "compiled": compiled,
            "keep": keep,
        }
        run = _opened(context, place)
        out = console(quiet=as_json)
        out.print(_opening(run), soft_wrap=True)
        again = _resuming(run, device, compiled)
        del place["keep"]
        repeat = command(context, run.options, place)
        diary = Diary(run, repeat, again, {**place, "compiled": run.compiled})
        summary = _train(run, diary, again, out)
        if as_json:
            print_json({**asdict(summary), "folder": str(run.folder)})
        else:
            _conclude(run, summary, out)
        if not summary.finished:
            complain(
                f"stopped after step {summary.steps} of {run.options.recipe.steps}, and saved",
                f"go on with: {again}",
            )
            raise typer.Exit(INTERRUPTED)


def _train(run: Run, diary: Diary, again: str, out: Console) -> Summary:
    """Train to the end or until stopped; the diary says how it went."""
    with _stoppable() as stop, training.hold(run.folder), _kept(run, again):
        diary.begin()
        try:
            summary = _go(run, stop, out)
        except CommandError as error:
            diary.end(max(run.checkpoints.steps(), default=0), str(error))
            raise
        diary.end(summary.steps)
    return summary


def _options(given: dict[str, Any]) -> Options:
    """The options of a run from the parameters of the command."""
    values = _of_the_run(given)
    if values["task"] == "digits" and values["data"] is not None:
        raise CommandError("--data is a text, the task is digits", "add --task text")
    recipe = {k: values.pop(k) for k in Recipe.__dataclass_fields__}
    return Options(recipe=Recipe(**recipe), **values)


def _explicit(context: typer.Context) -> dict[str, Any]:
    """What the user said of a run that is resumed, on the command line or in a file."""
    sources = [(field_of(k), context.get_parameter_source(k)) for k in context.params]
    said = {name for name, source in sources if source is not None and source.name != "DEFAULT"}
    return {name: value for name, value in _of_the_run(context.params).items() if name in said}


def _of_the_run(given: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the command that determine a run, as `Options` and `Recipe` call them."""
    values = {field_of(k): v for k, v in given.items() if k not in _NOT_OF_THE_RUN}
    values["set"] = dict(setting("--set", text) for text in values["set"] or ())
    if values["data"] is not None:  # to mean the same when it is resumed from another folder
        values["data"] = str(values["data"].resolve())
    return values


def _opened(context: typer.Context, place: dict[str, Any]) -> Run:
    """The run, new or resumed."""
    output: Path | None = context.params["output"]
    with hinting("see `nucleon train --help`", (ValueError, TypeError, ModuleNotFoundError)):
        if not context.params["resume"]:
            options = _options(context.params)
            return training.begin(options, output or new_folder(options), say=_say, **place)
        if output is None:
            raise CommandError("--resume needs a folder", "say which with --output")
        return training.resume(output, _explicit(context), say=_say, **place)


def _say(sentence: str) -> None:
    console(stderr=True).print(escape(sentence), soft_wrap=True)


def _resuming(run: Run, device: str, compiled: bool | None) -> str:
    """The command that goes on with a run."""
    words = ["nucleon", "train", "--resume", "--output", str(run.folder)]
    words += ["--optimizer", run.options.optimizer] if is_address(run.options.optimizer) else []
    words += ["--device", device] if device != "cpu" else []
    words += [] if compiled is None else ["--compile" if compiled else "--no-compile"]
    return shlex.join(words)


@contextmanager
def _kept(run: Run, again: str) -> Iterator[None]:
    """A folder that takes no more ends the run, not what it has saved."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(run.folder)  # a full disk does not name itself
        raise CommandError(
            explain(error)[0], f"make room there, then go on with: {again}"
        ) from error


@contextmanager
def _stoppable() -> Iterator[Callable[[], bool]]:
    """Whether somebody wants the run to stop: one Ctrl-C or SIGTERM ends it after the step.

    A second one interrupts at once; what was saved before is safe.
    """
    wanted: list[int] = []

    def ask(number: int, _: object) -> None:
        if wanted:
            raise KeyboardInterrupt
        wanted.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(wanted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _go(run: Run, stop: Callable[[], bool], out: Console) -> Summary:
    stage = "begins"
    with progress(f"train {run.options.optimizer}") as bar:
        left = run.options.recipe.steps - run.start
        if left:
            bar.begin(left, "steps")

        def record(figures: Record) -> None:
            nonlocal stage
            lost = next(figures[k] for k in ("test_loss", "loss") if k in figures)
            if not math.isfinite(lost):
                raise CommandError(
                    f"the loss is {lost} after step {figures['step']:.0f}",
                    "lower --lr, or add --warmup or --clip, in another --output",
                )
            if "test_loss" in figures:
                accuracy = f"accuracy {figures['accuracy']:.4f}"
                out.print(f"step {figures['step']:6.0f}  test loss {lost:.4f}  {accuracy}")
            else:
                stage = f"loss {lost:.4f}"

        return run.go(record=record, stepped=lambda _: bar.advance(1, stage), stop=stop)


def _opening(run: Run) -> str:
    count = sum(p.numel() for p in run.model.parameters())
    where = f" from step {run.start}" if run.start else ""
    return (
        f"[bold]{run.options.task}[/]: {count:,} parameters by "
        f"{escape(run.options.optimizer)}{where}, {run.options.recipe.steps} steps, "
        f"in {escape(str(run.folder))}"
    )


def _conclude(run: Run, summary: Summary, out: Console) -> None:
    rows = {"steps": str(summary.steps)}
    for name in ("loss", "test_loss", "accuracy"):
        if name in summary.figures:
            rows[name.replace("_", " ")] = f"{summary.figures[name]:.4f}"
    rows["seconds"] = f"{summary.seconds:.1f}"
    if summary.optimizer_share is not None:
        rows["optimizer"] = f"{summary.optimizer_share:.1%} of a step"
    rows["folder"] = str(run.folder)
    out.print(columns(rows.items()))
