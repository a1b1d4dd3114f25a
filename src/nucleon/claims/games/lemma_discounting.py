"""lemma-discounting: the loss as discounted sums of its changes, an identity (Lemma G.2)."""

from typing import NamedTuple

import torch
from torch import Tensor

from nucleon import noise
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread, worst
from nucleon.claims.oracle.conversion import discounted_changes
from nucleon.claims.shown import Figure, Panel, Series, Table
from nucleon.online import theory

F64 = torch.float64
DISCOUNTS = (0.1, 0.5, 0.9, 0.99, 0.999)
ROUNDS, QUICK_ROUNDS = (1, 2, 7, 60), (1, 2, 7, 20)
INSTANCES, QUICK_INSTANCES = 10, 3
KINDS = ("walk", "alternating", "one jump")

# Of the losses' size: T sums of rounded terms, each at most 1/(1−γ) times a change.
ROUNDING = 1e-11


class Errors(NamedTuple):
    """The largest errors at one γ and T, over the largest |L(W_t)|."""

    discount: float
    rounds: int
    identity: float
    """Of left − right."""
    exact: float
    """Of right − the reference's."""
    alone: float
    """Of the first sum alone."""


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Both sides on three kinds of losses, beside the double sum in exact rational arithmetic."""
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    seeds = settings.seed_range(INSTANCES, QUICK_INSTANCES)
    progress.begin(len(DISCOUNTS) * len(rounds), "cases")
    found = list[Errors]()
    for discount in DISCOUNTS:
        for length in rounds:
            errors = [case(k, length, discount, seed) for k in KINDS for seed in seeds]
            largest = (worst(column) for column in zip(*errors, strict=True))
            found.append(Errors(discount, length, *largest))
            progress.advance(1, f"γ = {discount:g}, T = {length}")
    alone = worst(e.alone for e in found)
    return Result(
        checks=(
            Check.at_most("|left − right|/size, largest", (e.identity for e in found), ROUNDING),
            Check.at_most("|right − the reference's|/size", (e.exact for e in found), ROUNDING),
            Check("the first sum alone: largest error/size", alone, ">", 0.1),
        ),
        tables=(
            Table.listing(
                "Largest errors, over the largest |L(W_t)|",
                found,
                {
                    "γ": lambda e: e.discount,
                    "T": lambda e: e.rounds,
                    "left − right": lambda e: e.identity,
                    "right − the reference's": lambda e: e.exact,
                    "first sum alone": lambda e: e.alone,
                },
            ),
        ),
        figures=(_figure(settings.first_seed),),
        records=tuple(e._asdict() for e in found),
        notes=(
            "The library forms the sums by one recursion, Ĝ ← γĜ + δ_t; the reference has the "
            "double sum as it is printed, in rational arithmetic, where left and right are equal "
            "without rounding. The first sum alone, the discounted change up to T, is not "
            "the change: the second sum is needed.",
        ),
    )


def losses(kind: str, rounds: int, seed: int) -> Tensor:
    """L(W_0) … L(W_T): a random walk, ±1 in turn, or one jump at a random time."""
    normal = noise.normal((rounds + 1,), seed=seed, dtype=F64)
    if kind == "walk":
        return normal.cumsum(0)
    t = torch.arange(rounds + 1)
    if kind == "alternating":
        return normal[0].sign() * (-1.0) ** t.double()
    return (t > seed % (rounds + 1)).double() + normal[0]


def case(kind: str, rounds: int, discount: float, seed: int) -> tuple[float, float, float]:
    """The errors of the identity, of the right side, and of its first sum alone."""
    values = losses(kind, rounds, seed)
    size = values.abs().max().item()
    left, right = theory.loss_decomposition(values, discount=discount)
    first, second = discounted_changes(values.tolist(), discount)
    return (
        (left - right).abs().item() / size,
        abs(right.item() - float(first + second)) / size,
        abs(left.item() - float(first)) / size,
    )


def _figure(seed: int) -> Figure:
    values = losses("walk", 60, seed)
    t = [float(k) for k in range(1, 61)]
    change = [(values[k] - values[0]).item() for k in range(1, 61)]
    lines = [Series("L(W_T) − L(W_0)", t, change, style=4)]
    for discount, style in ((0.9, 0), (0.5, 2)):
        firsts = [
            float(discounted_changes(values[: k + 1].tolist(), discount)[0]) for k in range(1, 61)
        ]
        lines.append(Series(f"first sum alone, γ = {discount:g}", t, firsts, style=style))
    caption = "What the discounted changes up to T leave out, the second sum puts back."
    panel = Panel("a random walk", "T", "change", tuple(lines))
    return Figure("sums", "The discounted changes of a loss", caption, (panel,))


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
    run=run,
    seconds=4,
    quick_seconds=1,
)
