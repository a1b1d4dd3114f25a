"""A training run in a folder: its options, its log and its checkpoints, made to be broken off.

    run.json       the options and the fingerprint of the data, written first
    trace.jsonl    the log, a record a line
    checkpoints/   see `nucleon.training.checkpoint`
    .lock          see `nucleon.training.folder`

A resumed run reads its options from the folder, drops the lines of the log that it will write
again, and ends with the weights and the log that it would have ended with unbroken.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from nucleon import _checks
from nucleon._files import WORDS, to_json, write_whole
from nucleon._naming import is_address
from nucleon.training import data, loop
from nucleon.training.checkpoint import Checkpoints, tidy
from nucleon.training.clock import Clock
from nucleon.training.data import Data, Text, Tokens
from nucleon.training.folder import RunError, check_held, hold
from nucleon.training.loop import Recipe, Record
from nucleon.training.models import GPT, MLP, GPTConfig
from nucleon.training.optimizers import make_optimizer, routes

Task = Literal["digits", "text"]
OPTIONS, LOG, CHECKPOINTS = "run.json", "trace.jsonl", "checkpoints"
SCHEMA = 1
_KINDS = (
    ("optimizer", str, "a name"),
    ("set", Mapping, "an object"),
    ("seed", int, "an integer"),
    ("data", str | None, "a path or null"),
)


@dataclass(frozen=True)
class Options:
    """What a run is determined by; two runs with equal options and data are equal on a CPU.

    Args:
        task: "digits", a perceptron on scikit-learn's digits, or "text", a GPT on a text.
        recipe: steps, schedule and the like.
        optimizer: see `make_optimizer` ("leon").
        lr: learning rate (None: the usual one of the optimizer).
        aux_lr: that of AdamW beside a matrix method (None: the usual one).
        set: further options of the optimizer (none).
        batch: examples a batch (32).
        seed: of weights, batches, dropout and noise (0).
        width: of the layers (64 or 128, by task).
        layers: number of hidden layers or blocks (2 or 4, by task).
        heads: of the GPT's attention (4).
        context: length of the GPT's windows (128).
        dropout: of the GPT (0).
        tied: head and embedding of the GPT are one (False).
        data: the text file or folder (None: the standard library's sources).
        megabytes: how much of it (2).
        tokens: "char" or "bpe" ("char").
        vocabulary: most tokens of "bpe" (512).
    """

    task: Task
    recipe: Recipe
    optimizer: str = "leon"
    lr: float | None = None
    aux_lr: float | None = None
    set: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch: int = 32
    seed: int = 0
    width: int | None = None
    layers: int | None = None
    heads: int = 4
    context: int = 128
    dropout: float = 0.0
    tied: bool = False
    data: str | None = None
    megabytes: float = 2.0
    tokens: Tokens = "char"
    vocabulary: int = 512

    def __post_init__(self) -> None:
        _checks.choice("task", self.task, get_args(Task))
        _checks.count("batch", self.batch)
        _checks.positive("megabytes", self.megabytes)
        for name, kinds, words in _KINDS:  # which a file may have, if not the command line
            if not isinstance(getattr(self, name), kinds):
                raise TypeError(f"{name} must be {words}, got {getattr(self, name)!r:.60}")


@dataclass(frozen=True)
class Summary:
    """How a run stands.

    Args:
        steps: done, of those of the recipe.
        finished: whether those are all.
        parameters: numbers in the model.
        figures: the last of each figure that was recorded.
        seconds: of this part of the run.
        optimizer_share: of the time of its steps; None where too few were done to tell.
    """

    steps: int
    finished: bool
    parameters: int
    figures: Record
    seconds: float
    optimizer_share: float | None


def load_data(options: Options) -> Data:
    """The data of a run."""
    if options.task == "digits":
        return data.digits()
    place = None if options.data is None else Path(options.data)
    return data.text(
        data.read(place, max(1, round(options.megabytes * 1e6))),
        tokens=options.tokens,
        vocabulary=options.vocabulary,
        context=options.context,
    )


def make_model(options: Options, found: Data) -> nn.Module:
    """The model of a run, with weights drawn from its seed."""
    torch.manual_seed(options.seed)
    if not isinstance(found, Text):
        return MLP(width=options.width or 64, layers=options.layers or 2)
    config = GPTConfig(
        vocabulary=found.tokenizer.size,
        context=options.context,
        layers=options.layers or 4,
        heads=options.heads,
        width=options.width or 128,
        dropout=options.dropout,
        tied=options.tied,
    )
    return GPT(config)


@dataclass(eq=False)
class Run:
    """A run that is about to begin, or to go on; `go` does it.

    Made by `begin` or `resume`.
    """

    options: Options
    folder: Path
    data: Data
    model: nn.Module
    optimizer: Optimizer
    checkpoints: Checkpoints
    start: int

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled."""
        return self.model._compiled_call_impl is not None

    def go(
        self,
        *,
        record: Callable[[Record], None] = lambda _: None,
        stepped: Callable[[int], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Summary:
        """Train until the end, or until `stop` says so; either way the state is saved.

        Args:
            record: is told every record of the log.
            stepped: is told the number of steps done, after each.
            stop: is asked before each step.
        """
        options, began = self.options, time.perf_counter()
        clock = Clock(next(self.model.parameters()).device)
        with hold(self.folder):
            keeper = _Keeper(self, record, stepped, stop)
            done = loop.train(
                self.model,
                self.optimizer,
                lambda i: self.data.batch(i, options.batch, seed=options.seed),
                options.recipe,
                held_out=lambda: self.data.held_out(options.batch),
                watcher=keeper,
                start=self.start,
                clock=clock,
            )
        return Summary(
            steps=done,
            finished=done == options.recipe.steps,
            parameters=sum(p.numel() for p in self.model.parameters()),
            figures=keeper.figures,
            seconds=time.perf_counter() - began,
            optimizer_share=clock.share,
        )


class _Keeper:
    """Writes the log and the checkpoints of a run."""

    def __init__(
        self,
        run: Run,
        record: Callable[[Record], None],
        stepped: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> None:
        self.run, self.tell, self.stepped, self.stop = run, record, stepped, stop
        self.figures: dict[str, float] = {}
        log = run.folder / LOG
        kept = [line for line in read_log(log) if line["step"] <= run.start]
        for line in kept:
            self.figures |= line
        write_whole(log, "".join(map(_line, kept)))

    def record(self, record: Record) -> None:
        check_held(self.run.folder)
        self.figures |= record
        with (self.run.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(_line(record))
        self.tell(record)

    def save(self, done: int) -> None:
        check_held(self.run.folder)
        self.run.checkpoints.save(done, loop.snapshot(self.run.model, self.run.optimizer))


def begin(
    options: Options,
    folder: Path,
    *,
    device: str = "cpu",
    compiled: bool | None = None,
    keep: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """A new run in a folder that has none.

    Args:
        options: of the run.
        folder: of the run.
        device: to train on ("cpu").
        compiled: compile the model (None: on CUDA).
        keep: newest checkpoints that stay (2).
        say: is told where the model cannot be compiled (nobody is).
    """
    _refuse_another(folder)
    run = _build(options, folder, device, keep)
    _compile(run, compiled, say)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        _refuse_another(folder)  # begun while this one was being built
        _write_options(run)
    return run


def _refuse_another(folder: Path) -> None:
    if not (folder / OPTIONS).exists():
        return
    with hold(folder):  # or it is being written, which says more
        raise RunError(
            f"{folder} holds a run already", "resume it with --resume, or choose another --output"
        )


def resume(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    compiled: bool | None = None,
    keep: int = 2,
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """The run of a folder, from its newest complete checkpoint, or from the start without one.

    Args:
        folder: of the run.
        changes: options that the caller believes in; they must be those of the run, but more
            `steps` may be asked of a constant schedule (none). An optimizer that is code, as
            `file.py:Class`, must be among them: the folder's word is not enough to run it.
        device: to train on ("cpu").
        compiled: compile the model (None: on CUDA).
        keep: newest checkpoints that stay (2).
        say: is told of damaged checkpoints, and where the model cannot be compiled (nobody is).
    """
    options, fingerprint = read_options(folder)
    options = _agreed(options, changes or {})
    _refuse_foreign_code(folder, options, changes or {})
    with hold(folder):
        tidy(folder)
        run = _build(options, folder, device, keep)
        if run.data.fingerprint != fingerprint:
            raise RunError(
                f"the data of {folder} are not those it was begun with",
                "restore them, or begin a new run with another --output",
            )
        _go_back(run, device, say)
        _compile(run, compiled, say)
        _write_options(run)  # should it be broken off again, it still knows how far it is to go
    return run


def _go_back(run: Run, device: str, say: Callable[[str], None]) -> None:
    """To the newest complete checkpoint, if there is one and it is not beyond the last step."""
    found = run.checkpoints.newest(say, device=device)
    if found is None:
        return
    run.start, state = found
    loop.restore(state, run.model, run.optimizer)
    if run.options.recipe.steps < run.start:
        raise RunError(
            f"{run.folder} has done {run.start} steps already, --steps is "
            f"{run.options.recipe.steps}",
            "ask for more steps, or begin a new run with another --output",
        )


def read_options(folder: Path) -> tuple[Options, str]:
    """The options of the run of a folder, and the fingerprint of its data."""
    path = folder / OPTIONS
    if os.path.lexists(path) and not path.is_file():  # of a pipe or a device there may be no end
        raise RunError(f"{path} is not a plain file", "begin a new run with another --output")
    try:
        facts = json.loads(path.read_text("utf-8"))
        options = dict(facts["options"])
        recipe = Recipe(**options.pop("recipe"))
        found = Options(recipe=recipe, **options)
        words = {name: word for name, word in found.set.items() if word in (*WORDS,)}
        numbers = {name: WORDS[word] for name, word in words.items()}
        return replace(found, set={**found.set, **numbers}), cast(str, facts["data"])
    except FileNotFoundError:
        raise RunError(f"there is no run in {folder}", "begin one without --resume") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(
            f"{path} cannot be read: {error}", "begin a new run with another --output"
        ) from error


def _write_options(run: Run) -> None:
    facts = {"schema": SCHEMA, "options": asdict(run.options), "data": run.data.fingerprint}
    write_whole(run.folder / OPTIONS, to_json(facts, indent=1) + "\n")


def read_log(path: Path) -> list[dict[str, float]]:
    """The records of a log; a line that a killed run left unfinished is the last, and dropped."""
    if not path.exists():
        return []
    records: list[dict[str, float]] = []
    for line in path.read_text("utf-8").splitlines():
        try:
            found = json.loads(line).items()
            records.append({k: float(v) if isinstance(v, str) else v for k, v in found})
        except ValueError:
            break
    return records


def _build(options: Options, folder: Path, device: str, keep: int) -> Run:
    found = load_data(options)
    model = make_model(options, found).to(device)
    seeded = {"seed": options.seed} if routes(options.optimizer) else {}
    chosen = {**seeded, **options.set}
    optimizer = make_optimizer(
        options.optimizer, model, lr=options.lr, aux_lr=options.aux_lr, **chosen
    )
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=keep)
    return Run(options, folder, found, model, optimizer, checkpoints, start=0)


def _compile(run: Run, wanted: bool | None, say: Callable[[str], None]) -> None:
    """Compile the model, in place: the names in its state stay as they are.

    A forward and a backward pass are taken, since the compiler sets to work only then; where it
    fails, the model is left as it was.
    """
    device = next(run.model.parameters()).device
    if not (device.type == "cuda" if wanted is None else wanted):
        return
    batch = run.data.batch(0, run.options.batch, seed=run.options.seed)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            run.model.compile()
            loop.try_out(run.model, batch, run.options.recipe.precision)
    except Exception as error:  # no compiler, or one that cannot do it: many kinds
        run.model._compiled_call_impl = None
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        say(f"the model cannot be compiled ({reason}); it is trained as it is")


def _agreed(options: Options, changes: Mapping[str, Any]) -> Options:
    """The options of a run, with the changes that leave what is done already as it is."""
    steps = changes.get("steps", options.recipe.steps)
    if steps != options.recipe.steps and options.recipe.schedule != "constant":
        raise RunError(
            f"the {options.recipe.schedule} schedule was made for {options.recipe.steps} steps, "
            f"--steps is {steps}",
            "leave --steps out, or begin a new run with another --output",
        )
    flat = {**asdict(options), **asdict(options.recipe), "steps": steps}
    for name, value in changes.items():
        said, known = (json.loads(to_json(x)) for x in (value, flat[name]))
        if said != known:  # where a pair is a list
            raise RunError(
                f"the run was begun with {name} = {flat[name]}, not {value}",
                "leave the option out, or begin a new run with another --output",
            )
    return replace(options, recipe=replace(options.recipe, steps=steps))


def _refuse_foreign_code(folder: Path, options: Options, changes: Mapping[str, Any]) -> None:
    """A folder may be a stranger's: code that only its file names is not run."""
    if is_address(options.optimizer) and "optimizer" not in changes:
        raise RunError(
            f"the run of {folder} has the optimizer {options.optimizer!r}, which is code to run",
            f"repeat --optimizer {options.optimizer!r} if you trust that file",
        )


def _line(record: Record) -> str:
    return to_json(record) + "\n"
