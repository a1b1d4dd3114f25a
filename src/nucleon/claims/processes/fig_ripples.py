"""fig-ripples: Muon, Pion and Leon on a rippled, kinked objective (Section 5.3, Appendix H)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nucleon.claims import optimizers
from nucleon.claims.engine import Claim, Item, Row, Rows, Run, at_least, at_most, below, cases
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

METHODS: Mapping[str, tuple[Callable[..., Optimizer], Mapping[str, Any]]] = {
    "Muon": (Muon, {"method": "svd"}),
    **{
        f"Pion, {noise}, k={k}": (
            Pion,
            {"method": "svd", "beta2": BETA, "smoothing_scale": noise, "samples": k},
        )
        for noise, k in (("literal", 1), ("literal", 10), ("theory", 10))
    },
    "Leon": (Leon, {"method": "eigh", "beta2": BETA}),
}


def made(method: str, parameter: Tensor, rate: float, seed: int) -> Optimizer:
    make, options = METHODS[method]
    options = {**options, "seed": seed} if make is Pion else options
    return make([parameter], rate, momentum=BETA, scale="none", **options)


def twin(method: str, shape: tuple[int, ...], seed: int) -> optimizers.OracleOptimizer:
    """Return the reference's of a stack of matrices."""
    make, options = METHODS[method]
    if make is Pion:
        literal, samples = options["smoothing_scale"] == "literal", options["samples"]
        return optimizers.pion(shape, literal=literal, samples=samples, seed=seed)
    return optimizers.LEON if make is Leon else optimizers.MUON


def descend(
    problem: Ripples, start: Tensor, method: str, rates: Sequence[float], seed: int
) -> Tensor:
    """Return the losses (T+1, instances, rates) along `STEPS` steps from `start`, all in one stack.

    A direction depends on the gradients alone. So the optimizer runs at rate 1 on Y, and
    X = X₀ + rate·Y moves by −rate·P at each step: what it does at that rate on X itself.
    """
    instances, rows, columns = start.shape
    y = torch.nn.Parameter(start.new_zeros(instances * len(rates), rows, columns))
    optimizer = made(method, y, 1.0, seed)
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
    problem = random_ripples(seeds)
    start = random_start(seeds)
    names = [n for n, (_, options) in METHODS.items() if options.get("samples", 1) == 1]
    names = names if run.quick else list(METHODS)

    def descended(method: str) -> dict[str, Any]:
        return {"_losses": descend(problem, start, method, RATES, run.seed)}

    stacks = run.each(cases(method=names), descended)
    paths = Rows(
        Row(method=s.method, rate=rate, losses=losses, final=losses[-1], upward=upward(losses))
        for s in stacks
        for rate, losses in zip(RATES, s._losses.unbind(-1), strict=True)
    )
    run.keep(paths)
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
        weight = torch.nn.Parameter(start.clone())
        optimizer = made(name, weight, UPWARD_RATE, run.seed)
        reference = twin(name, tuple(start.shape), run.seed)
        options = {"lr": UPWARD_RATE, "momentum": BETA, "beta2": BETA}
        error = optimizers.difference(optimizer, weight, problem.gradient, reference, **options)
        words = f"{name}: {optimizers.STEPS} steps against the reference's, over the rate"
        yield at_most(words, error, optimizers.EXACT)

    def ends(path: Row) -> str:
        deviation = f" ± {path.final.std().item():.2f}" if len(path.final) > 1 else ""
        return f"{path.final.mean().item():.2f}{deviation}; {path.upward.mean().item():.1f}"

    title = "Final loss, mean ± standard deviation over the instances; mean upward movement"
    yield paths.grid(title, "method", "rate", ends)
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
    yield f"""
        The paper sets the objective, 20×20 matrices, 100 measurements and β₁ = β₂ = 0.9 for Leon.
        Ours are β = 0.9 for the others, standard normal starts, {STEPS} steps, {len(seeds)}
        instances, the rates, Pion's k, exact polar factors and roots in float64, no scaling.

        “Literal” is Pion as printed; “theory” scales its noise as the theorem does, on a
        zero-padded matrix, since the theorem does not cover square ones.
    """


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
    seconds=(35, 4),
)
