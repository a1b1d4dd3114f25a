"""lemma-discounting: the loss as discounted sums of its changes, an identity (Lemma G.2)."""

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.engine import Claim, Item, Run, above, at_most, cases, worst
from nucleon.claims.oracle.conversion import discounted_changes
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.online import theory

DISCOUNTS = (0.1, 0.5, 0.9, 0.99, 0.999)
ROUNDS = ((1, 2, 7, 60), (1, 2, 7, 20))
INSTANCES = (10, 3)
KINDS = ("walk", "alternating", "one jump")

# Of the losses' size: T sums of rounded terms, each at most 1/(1−γ) times a change.
ROUNDING = 1e-11


def losses(kind: str, rounds: int, seed: int) -> Tensor:
    """Return L(W_0) … L(W_T): a random walk, ±1 in turn, or one jump at a random time."""
    normal = noise.normal((rounds + 1,), seed=seed, dtype=torch.float64)
    if kind == "walk":
        return normal.cumsum(0)
    t = torch.arange(rounds + 1)
    if kind == "alternating":
        return normal[0].sign() * (-1.0) ** t.double()
    return (t > seed % (rounds + 1)).double() + normal[0]


def errors(discount: float, rounds: int, seeds: Iterable[int]) -> dict[str, float]:
    """Return the largest errors of left, of the right side's value, and of its first sum.

    They are over max|L|.
    """
    every = dict[str, list[float]](identity=[], exact=[], alone=[])
    for kind, seed in itertools.product(KINDS, seeds):
        values = losses(kind, rounds, seed)
        left, right = (s.item() for s in theory.loss_decomposition(values, discount=discount))
        first, second = discounted_changes(values.tolist(), discount)
        apart = left - right, right - float(first + second), left - float(first)
        for column, error in zip(every.values(), apart, strict=True):
            column.append(abs(error) / values.abs().max().item())
    return {name: worst(column) for name, column in every.items()}


def measure(run: Run) -> Iterator[Item]:
    seeds = run.seeds(INSTANCES)
    points = cases(discount=DISCOUNTS, rounds=run.pick(ROUNDS))
    rows = run.each(points, lambda discount, rounds: errors(discount, rounds, seeds))
    yield at_most("|left − right|/size, largest", rows.column("identity"), ROUNDING)
    yield at_most("|right − the reference's|/size", rows.column("exact"), ROUNDING)
    yield above("the first sum alone: largest error/size", worst(rows.column("alone")), 0.1)
    columns = {"γ": "discount", "T": "rounds", "left − right": "identity"}
    columns |= {"right − the reference's": "exact", "first sum alone": "alone"}
    yield rows.listing("Largest errors, over the largest |L(W_t)|", columns)
    values = losses("walk", 60, run.seed)
    t = [float(k) for k in range(1, 61)]
    lines = [Series("L(W_T) − L(W_0)", t, (values[1:] - values[0]).tolist(), style=4)]
    for discount, style in ((0.9, 0), (0.5, 2)):
        sums = (discounted_changes(values[: k + 1].tolist(), discount)[0] for k in range(1, 61))
        name = f"first sum alone, γ = {discount:g}"
        lines.append(Series(name, t, list(map(float, sums)), style=style))
    caption = "What the discounted changes up to T leave out, the second sum puts back."
    panel = Panel("a random walk", "T", "change", tuple(lines))
    yield Figure("sums", "The discounted changes of a loss", caption, (panel,))
    yield "The library forms the printed double sum by one recursion, Ĝ ← γĜ + δ_t."


CLAIM = Claim(
    id="lemma-discounting",
    title="The loss as discounted sums of its changes",
    statement=(
        "L(W_T) − L(W_0) = Σ_t γ^{T-t}δ_t + (1−γ)Σ_{t<T}Σ_{s≤t}γ^{t-s}δ_s with "
        "δ_t = L(W_t) − L(W_{t-1})."
    ),
    place="Lemma G.2, Appendix G.1",
    tolerance=(
        f"On walks, alternation and jumps, five γ and up to 60 rounds, the two sides differ by at "
        f"most {ROUNDING:g} of the losses' size, the right one as much from exact rational "
        f"arithmetic; without the second sum they differ by more than 0.1."
    ),
    measure=measure,
    seconds=(3, 1),
)
