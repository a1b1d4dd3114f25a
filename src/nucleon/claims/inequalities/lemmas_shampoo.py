"""lemmas-shampoo: the inequalities behind Shampoo's regret (Proposition C.2, Lemmas C.3 to C.5)."""

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread, worst
from nucleon.claims.oracle import gradient_sums
from nucleon.claims.played import BOUND, text
from nucleon.claims.shown import Figure, Panel, Series, Table
from nucleon.online import theory
from nucleon.online.theory import Sides

F64 = torch.float64
SHAPES = ((1, 1), (1, 4), (3, 3), (2, 5), (5, 2))
ROUNDS = 12
INSTANCES, QUICK_INSTANCES = 40, 4
LENGTHS, QUICK_LENGTHS = (10, 100, 1000, 10_000), (10, 100, 1000)
ETAS = (0.3, math.sqrt(2), 5.0)

# Pseudo-inverse roots of a nearly singular Gram differ with the cutoff; of the summed forms that
# moves a share of about √eps.
AGREE = 1e-6
ROUNDING = 1e-9

STREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda z: z,
    "rank one": lambda z: z[:, :, :1] @ z[:1, :1],
    "decaying": lambda z: z * 0.5 ** torch.arange(len(z), dtype=F64)[:, None, None],
    "growing": lambda z: z * 3.0 ** torch.arange(len(z), dtype=F64)[:, None, None],
}


class Inequality(NamedTuple):
    """One inequality on one instance."""

    lemma: str
    share: float
    """Left/right."""
    apart: float
    """The larger relative distance of the two sides to the reference's."""


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """All lemmas on random streams of four kinds, then where they are equalities."""
    seeds = settings.seed_range(INSTANCES, QUICK_INSTANCES)
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    progress.begin(len(seeds) * len(SHAPES) + len(lengths), "instances")
    found = list[Inequality]()
    for seed in seeds:
        for shape in SHAPES:
            found += instance(seed, shape)
            progress.advance(1, text(shape))
    curves: dict[str, list[float]] = {"C.3": [], "C.4": []}
    for length in lengths:
        ones = torch.ones(length, 1, 1, dtype=F64)
        curves["C.3"].append(_share(theory.matrix_potential(ones)))
        curves["C.4"].append(_share(theory.shampoo_gradient_term(ones)))
        progress.advance(1, f"T = {length}")
    return Result(
        checks=checks(found, curves),
        tables=(_table(found),),
        figures=(_figure(lengths, curves),),
        records=tuple(f._asdict() for f in found),
        notes=(
            "The reference has both sides from singular values of the stacked gradients "
            "[G_1 … G_t], in which no Gram matrix is formed.",
            "Lemma C.3 and, at 1×1, Lemma C.4 tend to equality on many equal gradients: "
            "Σ1/√t = 2√T − 1.46. Proposition C.2 is an equality for steps that meet no boundary "
            "and the comparator X_{T+1}. Lemma C.5 is at 1×1 exactly ½ for a constant distance: "
            "its proof pays once for L_t and once for R_t.",
        ),
    )


# ------------------------------------------------------------------ the instances


def instance(seed: int, shape: tuple[int, int]) -> list[Inequality]:
    """Every lemma on streams of four kinds, and the descents of the proposition."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=F64, generator=generator)

    found = list[Inequality]()
    for make in STREAMS.values():
        gradients = make(normal(ROUNDS, *shape))
        points = 1.5 * _in_ball(normal(ROUNDS + 1, *shape))
        actions, comparator = points[:-1], points[-1]
        for name, g in (("C.3", gradients), ("C.3, columns", gradients.mT)):
            again = gradient_sums.matrix_potential(g.numpy())
            found.append(_compared(name, theory.matrix_potential(g), again))
        sides = theory.shampoo_gradient_term(gradients)
        found.append(_compared("C.4", sides, gradient_sums.gradient_term(gradients.numpy())))
        sides = theory.shampoo_distance_term(gradients, actions, comparator, radius=1.5)
        arrays = gradients.numpy(), actions.numpy(), comparator.numpy()
        found.append(_compared("C.5", sides, gradient_sums.distance_term(*arrays, radius=1.5)))
    for eta in ETAS:
        found.append(_descended("C.2, projected", projected(normal(40, 1, shape[1]), eta), eta))
        found.append(_descended("C.2, free", free(normal, shape, eta), eta))
    return found


def _compared(name: str, sides: Sides, again: tuple[float, float]) -> Inequality:
    apart = (abs(mine.item() / other - 1) for mine, other in zip(sides, again, strict=True))
    return Inequality(name, _share(sides), worst(apart))


class Descent(NamedTuple):
    """Steps X_t, a comparator X, and the preconditioners L_t and R_t."""

    gradients: Tensor
    actions: Tensor
    comparator: Tensor
    left: Tensor
    right: Tensor


def _descended(name: str, d: Descent, eta: float) -> Inequality:
    """Proposition C.2 on a descent."""
    again = gradient_sums.mirror_descent(*(part.numpy() for part in d), eta=eta)
    return _compared(name, theory.mirror_descent_regret(*d, eta=eta), again)


def projected(gradients: Tensor, eta: float) -> Descent:
    """One-sided Shampoo on the unit ball of 1×n, where the projection is radial, worst X."""
    levels = gradients.square().sum((-2, -1)).cumsum(0).sqrt()
    x, actions = torch.zeros_like(gradients[0]), list[Tensor]()
    for gradient, level in zip(gradients, levels, strict=True):
        actions.append(x)
        y = x - eta * gradient / level
        x = y / y.norm().clamp(min=1)
    total = gradients.sum(0)
    identity = torch.eye(gradients.shape[-1], dtype=F64).expand(len(gradients), -1, -1)
    best = -total / total.norm()
    return Descent(gradients, torch.stack(actions), best, levels[:, None, None], identity)


def free(normal: Callable[..., Tensor], shape: tuple[int, int], eta: float) -> Descent:
    """X_{t+1} = X_t − ηL_t⁻¹G_tR_t⁻¹ for any L_t, R_t ≻ 0, against X_{T+1}: an equality."""
    gradients = normal(6, *shape)
    left, right = (
        torch.eye(side, dtype=F64) + (a @ a.mT).cumsum(0) / side
        for side in shape
        for a in [normal(6, side, side)]
    )
    x, actions = torch.zeros(shape, dtype=F64), list[Tensor]()
    for gradient, rows, columns in zip(gradients, left, right, strict=True):
        actions.append(x)
        x = x - eta * torch.linalg.solve(columns, torch.linalg.solve(rows, gradient).mT).mT
    return Descent(gradients, torch.stack(actions), x, left, right)


def _in_ball(x: Tensor) -> Tensor:
    return x / torch.linalg.matrix_norm(x, 2)[..., None, None]


def _share(sides: Sides) -> float:
    return (sides.left / sides.right).item()


# ------------------------------------------------------------------ what is checked


def _by_lemma(found: list[Inequality]) -> dict[str, list[Inequality]]:
    names = dict.fromkeys(f.lemma for f in found)
    return {name: [f for f in found if f.lemma == name] for name in names}


def checks(found: list[Inequality], curves: dict[str, list[float]]) -> tuple[Check, ...]:
    """No left side above its right one, both the reference's, and equality where there is."""
    still = torch.ones(30, 1, 1, dtype=F64)
    half = theory.shampoo_distance_term(still, 1.5 * still, -1.5 * still[0], radius=1.5)
    lemmas = _by_lemma(found)
    equal = [f.share for f in lemmas["C.2, free"]]
    # An eigenvalue of a rank-deficient Gram that is 1e-16 in size has a fourth root of 1e-4.
    loose = [f.apart for f in lemmas["C.5"]]
    apart = [f.apart for f in found if f.lemma != "C.5"]
    return (
        *(
            Check.at_most(f"{name}: largest left/right", (f.share for f in own), 1 + ROUNDING)
            for name, own in lemmas.items()
        ),
        Check.at_most("both sides against the reference's", apart, AGREE),
        Check.at_most("C.5, both sides against the reference's", loose, 5e-3),
        Check.at_least("C.2, free steps: smallest left/right", equal, 1 - 1e-7),
        Check("C.3, equal gradients: left/right at the largest T", curves["C.3"][-1], "≥", 0.97),
        Check("C.4, equal gradients: left/right at the largest T", curves["C.4"][-1], "≥", 0.97),
        Check("C.5, 1×1, constant distance: |left/right − ½|", abs(_share(half) - 0.5), "≤", 1e-12),
    )


def _table(found: list[Inequality]) -> Table:
    return Table.listing(
        "Left side over right side",
        _by_lemma(found).items(),
        {
            "inequality": lambda item: item[0],
            "instances": lambda item: len(item[1]),
            "largest left/right": lambda item: worst([f.share for f in item[1]]),
            "mean": lambda item: fmean(f.share for f in item[1]),
            "distance to the reference": lambda item: worst([f.apart for f in item[1]]),
        },
    )


def _figure(lengths: tuple[int, ...], curves: dict[str, list[float]]) -> Figure:
    x = [float(length) for length in lengths]
    lines = (
        Series("Lemma C.3", x, curves["C.3"], style=4),
        Series("Lemma C.4", x, curves["C.4"], style=2),
        Series("equality", x, [1.0] * len(x), style=BOUND),
    )
    panel = Panel("G_t = 1", "T", "left/right", lines, x_scale="log", marked=True)
    caption = "On equal gradients both lemmas tend to equality."
    return Figure("shares", "The lemmas on gradient sums are tight", caption, (panel,))


CLAIM = Claim(
    id="lemmas-shampoo",
    title="The lemmas behind Shampoo's regret",
    statement=(
        "ΣTr(GᵀM_t^{-1/2}G) ≤ 2Tr√M_T (C.3), ΣTr(GᵀM_t^{-1/4}GN_t^{-1/4}) ≤ "
        "2√(Tr M_T^{1/2}·Tr N_T^{1/2}) (C.4), the drift of Shampoo's distances (C.5), and the "
        "regret of mirror descent with any preconditioners (Proposition C.2)."
    ),
    place="Proposition C.2, Lemmas C.3, C.4 and C.5, Appendix C",
    tolerance=(
        "No left side exceeds its right one by more than 1e-9 of it on random, rank-one, decaying "
        "and growing streams of five shapes; both sides are the reference's to 1e-6 "
        "(C.5, with its fourth roots, to 5e-3); free steps of C.2 are an equality to 1e-7, C.3 and "
        "C.4 reach 0.97 on equal gradients, and C.5 is ½ at 1×1."
    ),
    run=run,
    seconds=12,
    quick_seconds=2,
)
