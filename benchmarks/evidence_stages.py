"""What `evidence.py` runs: the stages as data, and the rule that turns a log into the next runs.

The protocol in words is `docs/evidence.md`. Nothing here depends on a device or on the time: the
same log always gives the same list.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

ADAMW, MUON, LEON, LEON3 = "AdamW", "Muon", "Leon c=1", "Leon c=3"
LEON_NESTEROV = "Leon c=1, Nesterov"
OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    ADAMW: ("adamw", {}),
    MUON: ("muon", {"nesterov": True}),
    LEON: ("leon", {"smoothing_scale": 1.0}),
    LEON3: ("leon", {"smoothing_scale": 3.0}),
    LEON_NESTEROV: ("leon", {"smoothing_scale": 1.0, "nesterov": True}),
}
"""The optimizer of each method, and what is its own."""


class Variant(NamedTuple):
    """A method with one thing changed."""

    of: str
    options: Mapping[str, Any] = {}
    aux_lr: float | None = None
    """Instead of the one that is tuned."""
    rates: float = 1.0
    """What the rates of its grid are multiplied by."""


VARIANTS: Mapping[str, Variant] = {
    "Muon, aux_lr 3e-4": Variant(MUON, aux_lr=3e-4),
    "Muon, aux_lr 1e-3": Variant(MUON, aux_lr=1e-3),
    "Muon, no lookahead": Variant(MUON, {"nesterov": False}),
    "Muon, β₁ 0.9": Variant(MUON, {"momentum": 0.9}),
    "Leon, β₁ 0.9": Variant(LEON, {"momentum": 0.9}),
    "Muon, β₁ 0.98": Variant(MUON, {"momentum": 0.98}),
    "Leon, β₁ 0.98": Variant(LEON, {"momentum": 0.98}),
    "Muon, spectral": Variant(MUON, {"scale": "spectral"}, rates=8.0),
    "Leon, spectral": Variant(LEON, {"scale": "spectral"}, rates=8.0),
    "Leon, aux_lr 1e-3": Variant(LEON, aux_lr=1e-3),
    "Muon, anew": Variant(MUON),
    "Leon, anew": Variant(LEON),
}
"""What the defaults are judged by; a step of "spectral" is an eighth as long, more or less.

The last two change nothing: they say what a later version of the code changes.
"""
MATRIX_OPTIONS: Mapping[str, Any] = {"momentum": 0.95, "scale": "match-adamw"}
"""What all matrix methods share, unless a variant says otherwise."""
HALF_LIFE = (0.95, 16_384)
"""β₂ of AdamW, here and beside the matrix methods, at so many tokens per step.

With fewer tokens per step it is closer to 1, so that the average reaches back as many tokens.
"""
EXTENSIONS = 4
"""Rates that a grid may be extended by."""
TRIES = 2
"""A run that fails is tried once more, without a captured step."""

Losses = Callable[["Trial"], float | None]
"""The final loss of a run, infinite where it diverged; None where it is still to be done."""


@dataclass(frozen=True)
class Cell:
    """One setting in which the methods are compared."""

    name: str
    sequences: int
    """Per step."""
    shorter: tuple[float, ...] = ()
    """Shares of the steps with which the Leons are run at their best rate too."""
    adapter: bool = False
    """Whether only adapters of low rank are trained."""
    added: tuple[str, ...] = ()
    """Methods that were added to it after looking at its results."""


@dataclass(frozen=True)
class Trial:
    """A run; the phase it was first wanted in does not tell runs apart."""

    stage: str
    cell: str
    method: str
    rate: float
    aux_lr: float | None
    """Of AdamW beside a matrix method; AdamW by itself has one rate."""
    seed: int
    steps: int
    sequences: int
    adapter: bool = False
    phase: str = field(default="", compare=False)


@dataclass(frozen=True)
class Stage:
    """A model, a text, and the cells, methods, rates and seeds to compare."""

    name: str
    corpus: str
    """The file that `evidence_corpus.py` wrote."""
    layers: int
    width: int
    cells: tuple[Cell, ...]
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    """The grid, in equal ratios."""
    seeds: int
    multiples: tuple[float, ...] = (1.0, 2.0)
    """Of the best rate, at which all seeds are run."""
    context: int = 256
    tokens: int = 10_000_000
    """Per run."""
    aux_rates: tuple[float, ...] = ()
    """The grid of `aux_lr`; without one, it is that of the stage before."""
    aux_rate: float = 1e-3
    """Muon's rate while `aux_lr` is tuned, in the first cell."""
    before: "Stage | None" = None
    """The stage whose results it uses."""
    frozen: bool = False
    """Whether the rates are `rates` times the best ones of the stage before: nothing is tuned."""
    tunes: bool = False
    """Whether it begins with the model of the stage before, trained."""
    varies: bool = False
    """Whether its methods are variants; their grids are `rates` times a best one of the stage
    before."""

    def steps(self, cell: Cell) -> int:
        """Number of steps of a run."""
        return self.tokens // (cell.sequences * self.context)

    def cell(self, name: str) -> Cell:
        """The cell of that name."""
        return next(cell for cell in self.cells if cell.name == name)


ALL = (ADAMW, MUON, LEON, LEON3)
A = Stage(
    name="A",
    corpus="novels.pt",
    layers=8,
    width=512,
    cells=(Cell("4k", 16, shorter=(0.9,), added=(LEON_NESTEROV,)), Cell("16k", 64), Cell("1k", 4)),
    methods=ALL,
    rates=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3),
    seeds=5,
    aux_rates=(5e-4, 2e-3, 8e-3),
)
B = Stage(
    name="B",
    corpus="programs.pt",
    layers=16,
    width=768,
    cells=(Cell("4k", 16),),
    methods=(MUON, LEON, LEON3),
    rates=(0.5, 1.0, 2.0),
    seeds=3,
    before=A,
    frozen=True,
)
C = Stage(
    name="C",
    corpus="plays.pt",
    layers=A.layers,
    width=A.width,
    cells=(
        Cell("full, 4", 4),
        Cell("full, 8", 8),
        Cell("LoRA, 4", 4, adapter=True),
        Cell("LoRA, 8", 8, adapter=True),
    ),
    methods=ALL,
    rates=(6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3),
    seeds=5,
    multiples=(1.0,),
    tokens=400_000,
    before=A,
    tunes=True,
)
D = replace(
    A,
    name="D",
    cells=(Cell("4k", 16),),
    methods=tuple(VARIANTS),
    rates=(0.5, 1.0, 2.0),
    seeds=5,
    multiples=(1.0,),
    aux_rates=(),
    before=A,
    varies=True,
)
STAGES = {stage.name: stage for stage in (A, B, C, D)}


@dataclass(frozen=True)
class Part:
    """Some of the runs of a stage: what is done together before the next part begins."""

    name: str
    stage: Stage
    cells: tuple[str, ...] = ()
    """Those it takes; none named: all."""
    methods: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()

    def takes(self, made: Trial) -> bool:
        """Whether a run of the stage belongs to it."""
        chosen = ((self.cells, made.cell), (self.methods, made.method), (self.phases, made.phase))
        return all(not names or name in names for names, name in chosen)


MATRIX = (MUON, LEON, LEON3, LEON_NESTEROV)
PARTS = (
    Part("A, 4 k and 16 k: grids, seeds", A, ("4k", "16k"), MATRIX),
    Part("B: the rates of A", B, phases=("seeds",)),
    Part("A, 4 k: AdamW's grid, as C begins with its best model", A, ("4k",), (ADAMW,), ("grid",)),
    *(Part(f"C: {cell.name} sequences", C, (cell.name,)) for cell in C.cells),
    Part("A, 1 k: grids, seeds", A, ("1k",), MATRIX),
    Part("B: half and twice these rates", B, phases=("around",)),
    Part("A, 4 k: AdamW's seeds", A, ("4k",), (ADAMW,), ("seeds",)),
    Part("A, 16 k and 1 k: AdamW", A, ("16k", "1k"), (ADAMW,)),
    Part("D: the defaults", D),
)
"""All runs, in the order in which they answer the question soonest."""


def tiny(stage: Stage) -> Stage:
    """The same stage with a network and runs that a processor finishes in a second."""
    cells = tuple(replace(cell, sequences=max(1, cell.sequences // 8)) for cell in stage.cells)
    tokens = 40 * cells[0].sequences * 16
    before = stage.before and tiny(stage.before)
    return replace(stage, layers=1, width=32, context=16, tokens=tokens, cells=cells, before=before)


def parts(stage: str | None = None, *, small: bool = False) -> tuple[Part, ...]:
    """What there is to do, of one stage or of all, at full size or `tiny`."""
    chosen = [part for part in PARTS if stage in (None, part.stage.name)]
    return tuple(replace(p, stage=tiny(p.stage)) if small else p for p in chosen)


def in_order(chosen: Sequence[Part], losses: Losses) -> Iterator[tuple[Part, Trial]]:
    """The runs that the log so far asks for, done or not, each with its part, in their order.

    Args:
        chosen: the parts, the first one first.
        losses: of the runs of all stages that are done.
    """
    for part in chosen:
        for made in wanted(part.stage, losses):
            if part.takes(made):
                yield part, made


def wanted(stage: Stage, losses: Losses) -> Iterator[Trial]:
    """The runs of a stage that the log so far asks for, done or not, in the order of their use.

    Args:
        stage: whose.
        losses: of the runs of all stages that are done.
    """
    if stage.tunes and base(stage, losses) is None:
        return  # there is nothing yet to begin with
    aux, tuning = aux_lr(stage, losses)
    yield from tuning
    if stage.frozen:
        yield from _frozen(stage, aux, losses)
        return
    matrix = [method for method in stage.methods if method != ADAMW]
    for methods in (matrix, [method for method in stage.methods if method == ADAMW]):
        if methods == matrix and aux is None and not stage.tunes:
            continue  # AdamW alone can go on before it is known
        for cell in stage.cells:
            yield from _cell(stage, cell, methods, aux, losses)
            if methods == matrix:
                yield from _cell(stage, cell, cell.added, aux, losses)


def _cell(
    stage: Stage, cell: Cell, methods: Sequence[str], aux: float | None, losses: Losses
) -> Iterator[Trial]:
    """The grids of some methods, then the seeds at the best rates, then Leon with fewer steps."""
    found: dict[str, float] = {}
    for method in methods:
        trials, best = grid(stage, cell, method, aux, losses)
        yield from trials
        if best is not None:
            found[method] = best
    yield from _seeds(stage, cell, found, aux)
    for share in cell.shorter:
        for seed in range(stage.seeds):
            for method in (m for m in (LEON, LEON3) if m in found):
                made = trial(stage, cell, method, found[method], aux, seed, "shorter")
                yield replace(made, steps=int(share * made.steps))


def grid(
    stage: Stage, cell: Cell, method: str, aux: float | None, losses: Losses
) -> tuple[list[Trial], float | None]:
    """The runs of a grid of rates, extended where needed, and its best rate once it is known."""

    def at(rate: float) -> Trial:
        return trial(stage, cell, method, rate, aux, 0, "grid")

    first = first_rates(stage, cell, method, losses)
    if not first:
        return [], None
    rates, best = search(first, lambda rate: losses(at(rate)))
    return [at(rate) for rate in rates], best


def first_rates(stage: Stage, cell: Cell, method: str, losses: Losses) -> tuple[float, ...]:
    """The grid before it is extended; none while the best rate that it follows from is unknown."""
    if not stage.varies:
        return stage.rates
    assert stage.before is not None
    variant = VARIANTS[method]
    best = best_rates(stage.before, stage.before.cell(cell.name), losses).get(variant.of)
    return () if best is None else tuple(best * variant.rates * factor for factor in stage.rates)


def aux_lr(stage: Stage, losses: Losses) -> tuple[float | None, list[Trial]]:
    """The rate of AdamW beside the matrix methods, once it is known, and the runs that tell."""
    if stage.tunes:
        return None, []
    if stage.before is not None:
        return aux_lr(stage.before, losses)[0], []

    def at(aux: float) -> Trial:
        return trial(stage, stage.cells[0], MUON, stage.aux_rate, aux, 0, "aux_lr")

    rates, best = search(stage.aux_rates, lambda aux: losses(at(aux)))
    return best, [at(aux) for aux in rates]


def search(
    rates: Sequence[float], loss: Callable[[float], float | None]
) -> tuple[list[float], float | None]:
    """A grid, extended by its own ratio until the best rate is not at an end, and that rate.

    The rate is None while a loss is missing. After `EXTENSIONS` the best is what it is; where all
    runs diverge, smaller rates are tried.
    """
    tried, ratio = list(rates), rates[1] / rates[0]
    while True:
        found = [loss(rate) for rate in tried]
        if any(value is None for value in found):
            return tried, None
        best = tried[min(range(len(tried)), key=lambda i: (found[i], i))]
        if best not in (tried[0], tried[-1]) or len(tried) == len(rates) + EXTENSIONS:
            return tried, best
        if best == tried[0]:
            tried.insert(0, best / ratio)
        else:
            tried.append(best * ratio)


def trial(
    stage: Stage, cell: Cell, method: str, rate: float, aux: float | None, seed: int, phase: str
) -> Trial:
    """A run of full length; in fine-tuning AdamW's part has the rate of the matrices."""
    if stage.varies:
        aux = VARIANTS[method].aux_lr or aux
    own = None if method == ADAMW or cell.adapter else rate if stage.tunes else aux
    what = (stage.name, cell.name, method, rate, own, seed, stage.steps(cell))
    return Trial(*what, cell.sequences, cell.adapter, phase)


def base(stage: Stage, losses: Losses) -> Trial | None:
    """The run whose weights a stage begins with: AdamW's best in the first cell of that before."""
    assert stage.before is not None
    cell = stage.before.cells[0]
    _, best = grid(stage.before, cell, ADAMW, None, losses)
    return None if best is None else trial(stage.before, cell, ADAMW, best, None, 0, "base")


def best_rates(stage: Stage, cell: Cell, losses: Losses) -> dict[str, float]:
    """The best rate of each method in a cell, where it is known; a frozen stage has found none."""
    source = stage.before if stage.frozen else stage
    assert source is not None
    there = source.cell(cell.name)
    aux, _ = aux_lr(source, losses)
    methods = (*stage.methods, *cell.added)
    found = {m: grid(source, there, m, aux, losses)[1] for m in methods}
    return {method: rate for method, rate in found.items() if rate is not None}


def preferred(stage: Stage, cell: Cell, losses: Losses) -> str:
    """The Leon with the smaller loss at its best rate in a cell of a grid."""
    aux, best = aux_lr(stage, losses)[0], best_rates(stage, cell, losses)

    def loss(method: str) -> float:
        value = losses(trial(stage, cell, method, best[method], aux, 0, "grid"))
        return math.inf if value is None else value

    return min((LEON, LEON3), key=loss)


def _seeds(
    stage: Stage, cell: Cell, best: Mapping[str, float], aux: float | None
) -> Iterator[Trial]:
    """The best rates first; all methods with one seed, then with the next."""
    for multiple in stage.multiples:
        for seed in range(stage.seeds):
            for method, rate in best.items():
                yield trial(stage, cell, method, multiple * rate, aux, seed, "seeds")


def _frozen(stage: Stage, aux: float | None, losses: Losses) -> Iterator[Trial]:
    """Muon, and the Leon that was preferred before, at their rates there and around them."""
    assert stage.before is not None
    for cell in stage.cells:
        best = best_rates(stage, cell, losses)
        if aux is None or len(best) < len(stage.methods):
            return
        pair = (MUON, preferred(stage.before, stage.before.cell(cell.name), losses))
        for factor in stage.rates:
            phase = "seeds" if factor == 1.0 else "around"
            for seed in range(stage.seeds):
                for method in pair:
                    yield trial(stage, cell, method, factor * best[method], aux, seed, phase)
