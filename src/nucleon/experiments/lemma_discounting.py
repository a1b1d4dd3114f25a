"""lemma-discounting: the loss as discounted sums of its changes, an identity (Lemma G.2)."""

import itertools
from fractions import Fraction

import torch
from torch import Tensor

from nucleon import noise, theory
from nucleon.experiments.base import (
    Check,
    Claim,
    Figure,
    Panel,
    Progress,
    Result,
    Series,
    Settings,
    Table,
    one_thread,
)
from nucleon.experiments.games import worst

F64 = torch.float64
DISCOUNTS = (0.1, 0.5, 0.9, 0.99, 0.999)
ROUNDS, QUICK_ROUNDS = (1, 2, 7, 60), (1, 2, 7, 20)
INSTANCES, QUICK_INSTANCES = 10, 3
KINDS = ("walk", "alternating", "one jump")

# Of the losses' size: T sums of rounded terms, each at most 1/(1−γ) times a change.
ROUNDING = 1e-11


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Both sides on three kinds of losses, beside the double sum in exact rational arithmetic."""
    rounds = QUICK_ROUNDS if settings.quick else ROUNDS
    seeds = settings.seed_range(INSTANCES, QUICK_INSTANCES)
    progress.begin(len(DISCOUNTS) * len(rounds), "cases")
    rows = list[tuple[float, int, float, float, float]]()
    for discount in DISCOUNTS:
        for length in rounds:
            errors = [case(k, length, discount, seed) for k in KINDS for seed in seeds]
            identity, exact, alone = (worst(list(column)) for column in zip(*errors, strict=True))
            rows.append((discount, length, identity, exact, alone))
            progress.advance(1, f"γ = {discount:g}, T = {length}")
    return Result(
        checks=(
            Check("|left − right|/size, largest", worst([r[2] for r in rows]), "≤", ROUNDING),
            Check("|right − exact double sum|/size", worst([r[3] for r in rows]), "≤", ROUNDING),
            Check("the first sum alone: largest error/size", worst([r[4] for r in rows]), ">", 0.1),
        ),
        tables=(
            Table(
                "Largest errors, over the largest |L(W_t)|",
                ("γ", "T", "left − right", "right − exact", "first sum alone"),
                tuple(rows),
            ),
        ),
        figures=(_figure(settings.first_seed),),
        records=tuple(
            dict(zip(("discount", "rounds", "identity", "exact", "alone"), row, strict=True))
            for row in rows
        ),
        notes=(
            "The library forms the sums by one recursion, Ĝ ← γĜ + δ_t; the second evaluation is "
            "the double sum as it is printed, in rational arithmetic, where left and right are "
            "equal without rounding. The first sum alone, the discounted change up to T, is not "
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
    exact = [Fraction(v) for v in values.tolist()]
    gamma = Fraction(discount)
    first, second = double_sums(exact, gamma)
    change = exact[-1] - exact[0]
    assert first + second == change  # exactly: there is no rounding here
    return (
        (left - right).abs().item() / size,
        abs(right.item() - float(change)) / size,
        abs(float(first - change)) / size,
    )


def double_sums(values: list[Fraction], gamma: Fraction) -> tuple[Fraction, Fraction]:
    """Σ_t γ^{T-t}δ_t and (1−γ)Σ_{t<T}Σ_{s≤t}γ^{t-s}δ_s as printed."""
    steps = [after - before for before, after in itertools.pairwise(values)]
    powers = [gamma**k for k in range(len(steps))]

    def discounted(t: int) -> Fraction:
        terms = (power * step for power, step in zip(powers, reversed(steps[:t]), strict=False))
        return sum(terms, Fraction(0))

    inner = sum((discounted(t) for t in range(1, len(steps))), Fraction(0))
    return discounted(len(steps)), (1 - gamma) * inner


def _figure(seed: int) -> Figure:
    values = losses("walk", 60, seed)
    t = [float(k) for k in range(1, 61)]
    change = [(values[k] - values[0]).item() for k in range(1, 61)]
    lines = [Series("L(W_T) − L(W_0)", t, change, style=4)]
    for discount, style in ((0.9, 0), (0.5, 2)):
        firsts = [
            float(
                double_sums([Fraction(v) for v in values[: k + 1].tolist()], Fraction(discount))[0]
            )
            for k in range(1, 61)
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
