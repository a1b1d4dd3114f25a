"""fig-ripples: Muon, Pion and Leon on a rippled, kinked objective (Section 5.3, Appendix H)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon.claims import optimizers
from nucleon.claims.engine import (
    Claim,
    Item,
    Row,
    Rows,
    Run,
    at_least,
    at_most,
    below,
    cases,
    notes,
)
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.online.problems import Ripples, random_ripples, random_start
from nucleon.optim import Leon, Muon, Pion

RATES = (0.003, 0.01, 0.03, 0.1)
STEPS = 300
SEEDS = (10, 5)
BETA = 0.9

# At this rate Muon moves upward at least so many times as much as Leon.
UPWARD_RATE, UPWARD_RATIO = 0.01, 10.0
# One draw of Pion is a bold step, ten are nearly Leon's: so many times as much as Pion's.
PION_RATIOS = {"Pion, literal, k=1": 3.0, "Pion, literal, k=10": 10.0}

Make = Callable[[list[Tensor], float, int], Optimizer]


@dataclass(frozen=True)
class RippleOptimizer:
    """An optimizer of the figure, made from (parameters, rate, seed); it costs `samples` polars."""

    make: Make
    twin: Callable[[tuple[int, ...], int], optimizers.OracleOptimizer]
    """The reference's, from the shape of the stack and the seed."""
    samples: int = 1


def _pion(smoothing_scale: str, samples: int) -> RippleOptimizer:
    options: dict[str, Any] = {"beta2": BETA, "method": "svd", "scale": "none"}
    options |= {"smoothing_scale": smoothing_scale, "samples": samples}
    return RippleOptimizer(
        lambda params, rate, seed: Pion(params, rate, BETA, seed=seed, **options),
        lambda shape, seed: optimizers.pion(
            shape, literal=smoothing_scale == "literal", samples=samples, seed=seed
        ),
        samples,
    )


METHODS: Mapping[str, RippleOptimizer] = {
    "Muon": RippleOptimizer(
        lambda params, rate, seed: Muon(params, rate, BETA, method="svd", scale="none"),
        lambda shape, seed: optimizers.MUON,
    ),
    "Pion, literal, k=1": _pion("literal", 1),
    "Pion, literal, k=10": _pion("literal", 10),
    "Pion, theory, k=10": _pion("theory", 10),
    "Leon": RippleOptimizer(
        lambda params, rate, seed: Leon(
            params, rate, BETA, beta2=BETA, method="eigh", scale="none"
        ),
        lambda shape, seed: optimizers.LEON,
    ),
}


def descend(
    problem: Ripples, start: Tensor, make: Make, rates: Sequence[float], seed: int
) -> Tensor:
    """Return the losses (T+1, instances, rates) along `STEPS` steps from `start`, all in one stack.

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
    return torch.stack(losses)


def upward(losses: Tensor) -> Tensor:
    """Return Σ max(0, f(X_{t+1}) − f(X_t)), the total upward movement, of losses (T+1, …)."""
    return losses.diff(dim=0).clamp(min=0).sum(dim=0)


def measure(run: Run) -> Iterator[Item]:
    """Run every method at every rate; quick runs leave methods with k > 1 out."""
    seeds = run.seeds(SEEDS)
    problem = random_ripples(seeds, dtype=torch.float64)
    start = random_start(seeds, dtype=torch.float64)
    names = [n for n, m in METHODS.items() if m.samples == 1 or not run.quick]

    def descended(method: str) -> dict[str, Any]:
        return {"_losses": descend(problem, start, METHODS[method].make, RATES, run.seed)}

    stacks = run.each(cases(method=names), descended)
    paths = Rows(
        Row(method=s.method, rate=rate, losses=losses, final=losses[-1], upward=upward(losses))
        for s in stacks
        for rate, losses in zip(RATES, s._losses.unbind(-1), strict=True)
    )
    run.keep(
        Rows(
            Row(method=p.method, rate=p.rate, seed=seed, final=final, upward=up, loss=loss)
            for p in paths
            for seed, final, up, loss in zip(seeds, p.final, p.upward, p.losses.mT, strict=True)
        )
    )
    at_rate = paths.where(rate=UPWARD_RATE)
    muon = at_rate.one(method="Muon").upward.mean()
    for name, ratio in {"Leon": UPWARD_RATIO, **PION_RATIOS}.items():
        if name in names:
            over = muon / at_rate.one(method=name).upward.mean()
            words = f"Muon's upward movement over {name}'s, rate {UPWARD_RATE:g}"
            yield at_least(words, over, ratio)
    for rate in RATES:
        leon, other = (paths.one(method=m, rate=rate).final.mean() for m in ("Leon", "Muon"))
        yield below(f"Leon's mean final loss, against Muon's, rate {rate:g}", leon, other.item())
    for name in names:
        weight, method = torch.nn.Parameter(start.clone()), METHODS[name]
        error = optimizers.difference(
            method.make([weight], UPWARD_RATE, run.seed),
            weight,
            problem.gradient,
            method.twin(tuple(start.shape), run.seed),
            lr=UPWARD_RATE,
            momentum=BETA,
            beta2=BETA,
        )
        words = f"{name}: {optimizers.STEPS} steps against the reference's, over the rate"
        yield at_most(words, error, optimizers.EXACT)
    yield from shown(paths)
    yield from notes(f"""
        The paper sets the objective, 20×20 matrices, 100 measurements and β₁ = β₂ = 0.9 for Leon.
        Ours are β = 0.9 for the others, standard normal starts, {STEPS} steps, {len(seeds)}
        instances, the rates, Pion's k, exact polar factors and roots in float64, no scaling.

        “Literal” is Pion as printed; “theory” scales its noise as the theorem does, on a
        zero-padded matrix, since the theorem does not cover square ones.
    """)


def shown(paths: Rows) -> Iterator[Item]:
    """Show final losses, the losses along the way, and both measures by the rate."""

    def spread(path: Row) -> str:
        deviation = f" ± {path.final.std().item():.2f}" if len(path.final) > 1 else ""
        return f"{path.final.mean().item():.2f}{deviation}"

    title = "Final loss, mean ± standard deviation over the instances"
    yield paths.grid(title, "method", "rate", spread)
    styles, steps = list(METHODS), [float(t) for t in range(STEPS + 1)]

    def along(rate: float) -> Panel:
        lines = (
            Series.spanning(p.method, steps, p.losses, styles.index(p.method))
            for p in paths.where(rate=rate)
        )
        return Panel(f"rate {rate:g}", "step", "loss", tuple(lines), y_scale="log")

    caption = "Mean loss over the instances; the band spans them all."
    title = "Loss along the way, by learning rate"
    yield Figure("loss-paths", title, caption, tuple(map(along, RATES)), shared_axes=True)

    def by_rate(title: str, label: str, name: str) -> Panel:
        columns = {m: paths.where(method=m).column(name) for m in paths.different("method")}
        lines = tuple(
            Series.spanning(m, RATES, torch.stack(values), styles.index(m))
            for m, values in columns.items()
        )
        return Panel(title, "learning rate", label, lines, "log", "log", marked=True)

    yield Figure(
        "by-rate",
        "Upward movement and final loss against the learning rate",
        "Mean over the instances; the band spans them all. Upward movement is the sum of all "
        "increases of the loss along a path.",
        (
            by_rate("total upward movement", "sum of the increases", "upward"),
            by_rate("final loss", f"loss after {STEPS} steps", "final"),
        ),
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
    measure=measure,
    seconds=(60, 8),
)
