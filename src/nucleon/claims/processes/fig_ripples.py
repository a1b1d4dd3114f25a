"""fig-ripples: Muon, Pion and Leon on a rippled, kinked objective (Section 5.3, Appendix H)."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon.claims import optimizers
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread
from nucleon.claims.shown import Figure, Panel, Series, Table, named, records
from nucleon.online.problems import Ripples, random_ripples, random_start
from nucleon.optim import Leon, Muon, Pion

RATES = (0.003, 0.01, 0.03, 0.1)
STEPS = 300
SEEDS, QUICK_SEEDS = 10, 5
BETA = 0.9

# At this rate Muon moves upward at least so many times as much as Leon.
UPWARD_RATE, UPWARD_RATIO = 0.01, 10.0
# One draw of Pion is a bold step, ten are nearly Leon's: so many times as much as Pion's.
PION_RATIOS = {"Pion, literal, k=1": 3.0, "Pion, literal, k=10": 10.0}

Make = Callable[[list[Tensor], float, int], Optimizer]


@dataclass(frozen=True)
class Method:
    """An optimizer of the figure, made from (parameters, rate, seed); it costs `samples` polars."""

    make: Make
    twin: Callable[[tuple[int, ...], int], optimizers.Twin]
    """The reference's, from the shape of the stack and the seed."""
    samples: int = 1


def _pion(smoothing_scale: Literal["theory", "literal"], samples: int) -> Method:
    return Method(
        lambda params, rate, seed: Pion(
            params,
            rate,
            BETA,
            beta2=BETA,
            smoothing_scale=smoothing_scale,
            samples=samples,
            method="svd",
            scale="none",
            seed=seed,
        ),
        lambda shape, seed: optimizers.pion(
            shape, literal=smoothing_scale == "literal", samples=samples, seed=seed
        ),
        samples,
    )


METHODS: Mapping[str, Method] = {
    "Muon": Method(
        lambda params, rate, seed: Muon(params, rate, BETA, method="svd", scale="none"),
        lambda shape, seed: optimizers.MUON,
    ),
    "Pion, literal, k=1": _pion("literal", 1),
    "Pion, literal, k=10": _pion("literal", 10),
    "Pion, theory, k=10": _pion("theory", 10),
    "Leon": Method(
        lambda params, rate, seed: Leon(
            params, rate, BETA, beta2=BETA, method="eigh", scale="none"
        ),
        lambda shape, seed: optimizers.LEON,
    ),
}


@dataclass(frozen=True)
class Path:
    """The losses f(X_0), …, f(X_T) of one method at one rate: (T+1, instances)."""

    method: str
    rate: float
    losses: Tensor

    @property
    def final(self) -> Tensor:
        """f(X_T): (instances,)."""
        return self.losses[-1]

    @property
    def upward(self) -> Tensor:
        """Σ max(0, f(X_{t+1}) − f(X_t)), the total upward movement: (instances,)."""
        return self.losses.diff(dim=0).clamp(min=0).sum(dim=0)


def descend(
    problem: Ripples,
    start: Tensor,
    make: Make,
    rates: Sequence[float],
    seed: int,
    tick: Callable[[], None],
) -> Tensor:
    """The losses (T+1, instances, rates) along `STEPS` steps from `start`, all in one stack.

    A direction depends on the gradients alone. So the optimizer runs at rate 1 on Y, and
    X = X₀ + rate·Y moves by −rate·P at each step: what it does at that rate on X itself.
    """
    instances, rows, columns = start.shape
    y = torch.nn.Parameter(start.new_zeros(instances * len(rates), rows, columns))
    optimizer = make([y], 1.0, seed)
    each = Ripples(problem.measurements.unsqueeze(1))  # (instances, 1, k, m, n)
    rate = start.new_tensor(rates)[:, None, None]
    losses: list[Tensor] = []
    with torch.no_grad():
        for step in range(STEPS + 1):
            x = start.unsqueeze(1) + rate * y.unflatten(0, (instances, len(rates)))
            losses.append(each.value(x))
            if step < STEPS:
                y.grad = each.gradient(x).flatten(0, 1)
                optimizer.step()
                tick()
    return torch.stack(losses)


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Run every method at every rate; `quick` takes fewer instances and no method with k > 1."""
    seeds = settings.seed_range(SEEDS, QUICK_SEEDS)
    problem = random_ripples(seeds, dtype=torch.float64)
    start = random_start(seeds, dtype=torch.float64)
    methods = {n: m for n, m in METHODS.items() if m.samples == 1 or not settings.quick}
    progress.begin(sum(m.samples for m in methods.values()) * STEPS, "stacks")

    paths: list[Path] = []
    for name, method in methods.items():
        tick = partial(progress.advance, method.samples, name)
        losses = descend(problem, start, method.make, RATES, settings.first_seed, tick)
        paths += [Path(name, rate, losses[..., i]) for i, rate in enumerate(RATES)]
    return Result(
        checks=(
            *_checks(paths),
            *(_agrees(name, m, problem, start, settings.first_seed) for name, m in methods.items()),
        ),
        tables=(
            _table("Final loss, mean ± standard deviation over the instances", paths, "final"),
            _table("Total upward movement, mean ± standard deviation", paths, "upward"),
        ),
        figures=(_paths_figure(paths), _rates_figure(paths)),
        records=records(
            list(itertools.product(paths, enumerate(seeds))),
            {
                "method": lambda at: at[0].method,
                "rate": lambda at: at[0].rate,
                "seed": lambda at: at[1][1],
                "final": lambda at: at[0].final[at[1][0]].item(),
                "upward": lambda at: at[0].upward[at[1][0]].item(),
                "loss": lambda at: at[0].losses[:, at[1][0]].tolist(),
            },
        ),
        notes=_notes(paths, len(seeds)),
    )


def _agrees(name: str, method: Method, problem: Ripples, start: Tensor, seed: int) -> Check:
    """The first steps of a method at the rate of the checks, against the reference's."""
    weight = torch.nn.Parameter(start.clone())
    error = optimizers.difference(
        method.make([weight], UPWARD_RATE, seed),
        weight,
        problem.gradient,
        method.twin(tuple(start.shape), seed),
        lr=UPWARD_RATE,
        momentum=BETA,
        beta2=BETA,
    )
    label = f"{name}: {optimizers.STEPS} steps against the reference's, over the rate"
    return Check(label, error, "≤", optimizers.EXACT)


def _checks(paths: list[Path]) -> tuple[Check, ...]:
    found = {(p.method, p.rate): p for p in paths}
    muon = found["Muon", UPWARD_RATE].upward.mean()
    smooth = {"Leon": UPWARD_RATIO, **PION_RATIOS}
    upward = (
        Check(
            f"Muon's upward movement over {name}'s, rate {UPWARD_RATE:g}",
            (muon / found[name, UPWARD_RATE].upward.mean()).item(),
            "≥",
            ratio,
        )
        for name, ratio in smooth.items()
        if (name, UPWARD_RATE) in found
    )
    final = (
        Check(
            f"Leon's mean final loss, against Muon's, rate {rate:g}",
            found["Leon", rate].final.mean().item(),
            "<",
            found["Muon", rate].final.mean().item(),
        )
        for rate in RATES
    )
    return *upward, *final


def _table(title: str, paths: list[Path], what: Literal["final", "upward"]) -> Table:
    def cell(method: str, rate: float) -> str:
        values: Tensor = next(
            getattr(p, what) for p in paths if (p.method, p.rate) == (method, rate)
        )
        spread = f" ± {values.std().item():.2f}" if len(values) > 1 else ""
        return f"{values.mean().item():.2f}{spread}"

    methods = dict.fromkeys(p.method for p in paths)
    rates = {f"rate {rate:g}": rate for rate in RATES}
    return Table.grid(title, "method", named(methods), rates, cell)


def _series(method: str, x: list[float], values: Tensor) -> Series:
    """Values (points, instances) in the look of their method."""
    return Series.spanning(method, x, values, list(METHODS).index(method))


def _paths_figure(paths: list[Path]) -> Figure:
    steps = [float(t) for t in range(STEPS + 1)]
    panels = tuple(
        Panel(
            f"rate {rate:g}",
            "step",
            "loss",
            tuple(_series(p.method, steps, p.losses) for p in paths if p.rate == rate),
            y_scale="log",
        )
        for rate in RATES
    )
    caption = "Mean loss over the instances; the band spans them all."
    title = "Loss along the way, by learning rate"
    return Figure("loss-paths", title, caption, panels, shared_axes=True)


def _rates_figure(paths: list[Path]) -> Figure:
    def panel(title: str, label: str, values: Callable[[Path], Tensor]) -> Panel:
        methods = dict.fromkeys(p.method for p in paths)
        series = (
            _series(name, list(RATES), torch.stack([values(p) for p in paths if p.method == name]))
            for name in methods
        )
        return Panel(title, "learning rate", label, tuple(series), "log", "log", marked=True)

    return Figure(
        "by-rate",
        "Upward movement and final loss against the learning rate",
        "Mean over the instances; the band spans them all. Upward movement is the sum of all "
        "increases of the loss along a path.",
        (
            panel("total upward movement", "sum of the increases", lambda p: p.upward),
            panel("final loss", f"loss after {STEPS} steps", lambda p: p.final),
        ),
    )


def _notes(paths: list[Path], instances: int) -> tuple[str, ...]:
    final = {(p.method, p.rate): p.final for p in paths}
    below = [int((final["Leon", rate] < final["Muon", rate]).sum()) for rate in RATES]
    lowest = [
        f"{rate:g}"
        for rate in RATES
        if min((p for p in paths if p.rate == rate), key=lambda p: p.final.mean()).method == "Leon"
    ]
    rates = ", ".join(f"{rate:g}" for rate in RATES)
    return (
        "The paper gives the objective, 20×20 matrices, 100 measurements and β₁ = β₂ = 0.9 for "
        "Leon. The rest is ours: β = 0.9 for the others too, standard normal starts, "
        f"{STEPS} steps, {instances} instances, the rates {rates}, Pion's k, exact polar factors "
        "and roots in float64, no scaling by shape.",
        "“Literal” is Pion as printed; “theory” scales its noise as the theorem does, on a "
        "zero-padded matrix, since the theorem does not cover square ones.",
        "The paper calls the paths of Pion and Leon monotonic. They are nearly so at the small "
        "rates only: the table of upward movement shows how far.",
        f"Leon ends below Muon in {', '.join(map(str, below))} of {instances} instances at the "
        f"rates {rates}. Its mean is the lowest of all methods here at {len(lowest)} of "
        f"{len(RATES)} rates ({', '.join(lowest) or 'none'}).",
        "Muon, and at the largest rate every method, amplifies rounding errors from step to step: "
        "with another processor or library those paths differ, and at large rates so do the means.",
    )


CLAIM = Claim(
    id="fig-ripples",
    title="Loss paths on rippled matrix sensing",
    statement=(
        "On a nonsmooth, rippled objective Muon oscillates, while Pion and Leon descend steadily, "
        "Leon slightly ahead."
    ),
    place="Section 5.3, the figure of convergence paths, and Appendix H",
    tolerance=(
        f"At rate {UPWARD_RATE:g} Muon moves upward at least {UPWARD_RATIO:g} times as much as "
        f"Leon, and Leon's mean final loss is below Muon's at every rate from {RATES[0]:g} to "
        f"{RATES[-1]:g}. Than Pion as printed it moves upward at least "
        f"{PION_RATIOS['Pion, literal, k=1']:g} times as much with one draw and, in full runs, "
        f"{PION_RATIOS['Pion, literal, k=10']:g} times with ten. The first {optimizers.STEPS} "
        f"steps of every method are the reference's to {optimizers.EXACT:g} of the rate."
    ),
    run=run,
    seconds=60,
    quick_seconds=8,
)
