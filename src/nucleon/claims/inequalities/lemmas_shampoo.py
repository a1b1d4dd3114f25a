"""lemmas-shampoo: the inequalities behind Shampoo's regret (Proposition C.2, Lemmas C.3 to C.5)."""

import math
from collections.abc import Callable, Iterator
from statistics import fmean

import torch
from torch import Tensor

from nucleon.claims.beside import share, sides_of
from nucleon.claims.engine import Claim, Item, Row, Rows, Run, at_least, at_most, cases, worst
from nucleon.claims.oracle import lemmas
from nucleon.claims.shown import Figure, Panel, Series, level
from nucleon.online import theory

F64 = torch.float64
SHAPES = ((1, 1), (1, 4), (3, 3), (2, 5), (5, 2))
ROUNDS = 12
INSTANCES = (40, 4)
LENGTHS = ((10, 100, 1000, 10_000), (10, 100, 1000))
ETAS = (0.3, math.sqrt(2), 5.0)

# Pseudo-inverse roots of a nearly singular Gram differ with the cutoff, which moves the
# summed forms by about √eps of them.
AGREE = 1e-6
ROUNDING = 1e-9

STREAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda z: z,
    "rank one": lambda z: z[:, :, :1] @ z[:1, :1],
    "decaying": lambda z: z * 0.5 ** torch.arange(len(z), dtype=F64)[:, None, None],
    "growing": lambda z: z * 3.0 ** torch.arange(len(z), dtype=F64)[:, None, None],
}


Descent = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""G_t, the steps X_t, a comparator X, and the preconditioners L_t and R_t."""


def projected(gradients: Tensor, eta: float) -> Descent:
    """Return one-sided Shampoo on the unit ball of 1×n, where the projection is radial, worst X."""
    levels = gradients.square().sum((-2, -1)).cumsum(0).sqrt()
    x, actions = torch.zeros_like(gradients[0]), list[Tensor]()
    for gradient, root in zip(gradients, levels, strict=True):
        actions.append(x)
        y = x - eta * gradient / root
        x = y / y.norm().clamp(min=1)
    total = gradients.sum(0)
    identity = torch.eye(gradients.shape[-1], dtype=F64).expand(len(gradients), -1, -1)
    best = -total / total.norm()
    return gradients, torch.stack(actions), best, levels[:, None, None], identity


def free(normal: Callable[..., Tensor], shape: tuple[int, int], eta: float) -> Descent:
    """Return X_{t+1} = X_t − ηL_t⁻¹G_tR_t⁻¹ for any L_t, R_t ≻ 0, against X_{T+1}: an equality."""
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
    return gradients, torch.stack(actions), x, left, right


def instance(seed: int, shape: tuple[int, int]) -> Iterator[Row]:
    """Evaluate every lemma on streams of four kinds, and the proposition on descents."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=F64, generator=generator)

    for make in STREAMS.values():
        g, points = make(normal(ROUNDS, *shape)), normal(ROUNDS + 1, *shape)
        points *= 1.5 / torch.linalg.matrix_norm(points, 2)[..., None, None]
        actions, comparator = points[:-1], points[-1]
        for name, fed in (("C.3", g), ("C.3, columns", g.mT)):
            twin = lemmas.matrix_potential(fed.numpy())
            yield Row(lemma=name, **sides_of(theory.matrix_potential(fed), twin))
        twin = lemmas.gradient_term(g.numpy())
        yield Row(lemma="C.4", **sides_of(theory.shampoo_gradient_term(g), twin))
        arrays = g.numpy(), actions.numpy(), comparator.numpy()
        twin = lemmas.distance_term(*arrays, radius=1.5)
        sides = theory.shampoo_distance_term(g, actions, comparator, radius=1.5)
        yield Row(lemma="C.5", **sides_of(sides, twin))
    for eta in ETAS:
        descents = {"C.2, projected": projected(normal(40, 1, shape[1]), eta)}
        descents["C.2, free"] = free(normal, shape, eta)
        for name, d in descents.items():
            twin = lemmas.mirror_descent(*(part.numpy() for part in d), eta=eta)
            yield Row(lemma=name, **sides_of(theory.mirror_descent_regret(*d, eta=eta), twin))


def equal_gradients(rounds: int) -> dict[str, float]:
    """Evaluate C.3 and C.4 on gradients of 1."""
    ones = torch.ones(rounds, 1, 1, dtype=F64)
    third, fourth = theory.matrix_potential(ones), theory.shampoo_gradient_term(ones)
    return {"C.3": share(third), "C.4": share(fourth)}


def measure(run: Run) -> Iterator[Item]:
    points = cases(seed=run.seeds(INSTANCES), shape=SHAPES)
    instances = run.each(points, lambda seed, shape: {"_rows": list(instance(seed, shape))})
    rows = run.keep(Rows(row for i in instances for row in i._rows))
    curves = run.each([{"rounds": t} for t in run.pick(LENGTHS)], equal_gradients)
    summary = Rows()
    for name in rows.different("lemma"):
        lemma = rows.where(lemma=name)
        shares, apart = lemma.column("share"), worst(lemma.column("apart"))
        yield at_most(f"{name}: largest left/right", shares, 1 + ROUNDING)
        summary.append(Row(lemma=name, largest=worst(shares), mean=fmean(shares), apart=apart))
    # An eigenvalue of a rank-deficient Gram that is 1e-16 in size has a fourth root of 1e-4.
    apart = rows.where(lambda row: row.lemma != "C.5").column("apart")
    yield at_most("both sides against the reference's", apart, AGREE)
    loose = rows.where(lemma="C.5").column("apart")
    yield at_most("C.5, both sides against the reference's", loose, 5e-3)
    equal = rows.where(lemma="C.2, free").column("share")
    yield at_least("C.2, free steps: smallest left/right", equal, 1 - 1e-7)
    lines = [level("equality", curves.column("rounds"))]
    for name, style in (("C.3", 4), ("C.4", 2)):
        shares = [vars(row)[name] for row in curves]
        lines.append(Series(f"Lemma {name}", curves.column("rounds"), shares, style=style))
        yield at_least(f"{name}, equal gradients: left/right at the largest T", shares[-1], 0.97)
    still = torch.ones(30, 1, 1, dtype=F64)
    half = share(theory.shampoo_distance_term(still, 1.5 * still, -1.5 * still[0], radius=1.5))
    yield at_most("C.5, 1×1, constant distance: |left/right − ½|", abs(half - 0.5), 1e-12)

    columns = {"inequality": "lemma", "largest left/right": "largest", "mean": "mean"}
    columns["distance to the reference"] = "apart"
    yield summary.listing("Left side over right side", columns)
    panel = Panel("G_t = 1", "T", "left/right", tuple(lines), x_scale="log", marked=True)
    caption = "On equal gradients both lemmas tend to equality."
    yield Figure("shares", "The lemmas on gradient sums are tight", caption, (panel,))
    yield """
        Proposition C.2 is an equality for steps that meet no boundary and the comparator X_{T+1}.
        Lemma C.5 is at 1×1 exactly ½ for a constant distance: its proof pays once for L_t and once
        for R_t.
    """


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
    measure=measure,
    seconds=(12, 2),
)
