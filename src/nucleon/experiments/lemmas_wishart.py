"""lemmas-wishart: the core of the Gaussian smoothing's constants (Lemmas E.1, E.2 and E.3)."""

import math
from typing import NamedTuple

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
from nucleon.experiments.games import BOUND, worst

F64 = torch.float64
HESSIAN_SHAPES = ((1, 1), (1, 4), (2, 2), (3, 5), (4, 8))
HESSIANS, QUICK_HESSIANS = 60, 10
DEGREES = (3, 4, 7, 40)
NONCENTRALITIES = (0.0, 1e-3, 0.1, 1.0, 10.0, 100.0, 3000.0)
# n ≥ m+5: from there on the entries of the inverse have a variance, hence an interval.
WISHART_SHAPES = ((1, 6), (2, 8), (3, 9))
SHIFTS = (0.0, 0.5, 2.0, 8.0)
SAMPLES, QUICK_SAMPLES = 100_000, 20_000
PANELS = 4000  # of the quadrature, where e^(−λv) needs λ/panels < 1
STEP = 1e-3

# Of a fourth-order second difference with the step 1e-3 of norms of order 10: truncation h⁴·O(1),
# rounding 16·1e-15·10/h².
AGREE = 1e-6
ERRORS = 5.0  # standard errors


class Inverse(NamedTuple):
    """E[((Z+Y)(Z+Y)ᵀ)⁻¹] for a shift of one row, by samples, in units of 1/(n−m−1)."""

    shape: tuple[int, int]
    shift: float
    largest: float
    """The largest eigenvalue of the mean."""
    shifted: float
    """The entry of the shifted row."""
    exact: float
    """The same by quadrature."""
    error: float
    """Its standard error."""
    free: float
    """The mean entry of the other rows, exactly 1; NaN where there are none."""
    free_error: float
    """Its standard error."""


@one_thread()
def run(settings: Settings, progress: Progress) -> Result:
    """Random Hessians, inverse moments by quadrature, inverse Wishart matrices by samples."""
    seeds = settings.seed_range(HESSIANS, QUICK_HESSIANS)
    progress.begin(len(HESSIAN_SHAPES) + len(DEGREES) + len(WISHART_SHAPES) * len(SHIFTS), "cases")
    hessians = list[tuple[float, float, float]]()
    for shape in HESSIAN_SHAPES:
        hessians += [hessian(seed, shape) for seed in seeds]
        progress.advance(1, f"E.1, {shape[0]}×{shape[1]}")
    moments = dict[tuple[int, float], tuple[float, float]]()
    for degrees in DEGREES:
        for noncentrality in NONCENTRALITIES:
            left, right = theory.inverse_chi_square(degrees, noncentrality)
            again = inverse_moment(degrees, noncentrality)
            moments[degrees, noncentrality] = ((left / right).item(), left.item() / again - 1)
        progress.advance(1, f"E.2, k = {degrees}")
    inverses = list[Inverse]()
    for shape in WISHART_SHAPES:
        for shift in SHIFTS:
            inverses.append(inverse(shape, shift, settings))
            progress.advance(1, f"E.3, {shape[0]}×{shape[1]}")
    return Result(
        checks=checks(hessians, moments, inverses),
        tables=(_moment_table(moments), _inverse_table(inverses)),
        figures=(_figure(moments, inverses),),
        records=(
            *({"lemma": "E.1", "share": s, "apart": a, "off": o} for s, a, o in hessians),
            *({"lemma": "E.2", "k": k, "λ": x, "share": s} for (k, x), (s, _) in moments.items()),
            *({"lemma": "E.3", **i._asdict()} for i in inverses),
        ),
        notes=(
            "E.1: the left side is compared with a second difference of ‖X + hD‖_*. It is an "
            "equality where D leaves the row space of X, and 0 along X, on a ray of which the norm "
            "is linear.",
            "E.2: E[1/χ²_k(λ)] = ∫_0^1 v^{k−3}·exp(−λ(1−v²)/2) dv, from the moment generating "
            "function, by Gauss–Legendre quadrature; the library sums a Poisson mixture. Equality "
            "at λ = 0.",
            "E.3: with one row shifted by σ the others stay central, and their entries of the "
            "expected inverse are exactly 1/(n−m−1), whatever σ: the bound is attained. The "
            "shifted row's entry is E.2 at k = n−m+1 and λ = σ²B, B ~ Beta((n−m+1)/2, (m−1)/2), "
            "integrated here as a second evaluation.",
        ),
    )


# ------------------------------------------------------------------ the instances


def hessian(seed: int, shape: tuple[int, int]) -> tuple[float, float, float]:
    """Lemma E.1: left/right, the distance to a second difference, and left/right off the rows."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vt = torch.linalg.svd(torch.randn(shape, dtype=F64, generator=generator))
    m, n = shape
    sigma = 1 + 2 * torch.rand(m, dtype=F64, generator=generator)
    x = (u * sigma) @ vt[:m]
    direction = torch.randn(shape, dtype=F64, generator=generator)
    direction /= direction.norm()
    left, right = theory.nuclear_hessian(x, direction)

    def norm(steps: int) -> Tensor:
        return torch.linalg.svdvals(x + steps * STEP * direction).sum()

    second = -norm(2) + 16 * norm(1) - 30 * norm(0) + 16 * norm(-1) - norm(-2)
    apart = (left - second / (12 * STEP**2)).abs().item()
    outside = math.nan
    if n > m:
        away = direction - direction @ vt[:m].mT @ vt[:m]
        off = theory.nuclear_hessian(x, away)
        outside = (off.left / off.right).item()
    return (left / right).item(), apart, outside


def inverse_moment(degrees: int, noncentrality: Tensor | float) -> float:
    """E[1/χ²_k(λ)] = ∫_0^1 v^{k−3}·exp(−λ(1−v²)/2) dv, or its mean over several λ."""
    v, weights = _legendre()
    mean = torch.as_tensor(noncentrality, dtype=F64).reshape(-1, 1)
    values = v ** (degrees - 3) * torch.exp(-mean * (1 - v**2) / 2)
    return (values @ weights).mean().item()


def inverse(shape: tuple[int, int], shift: float, settings: Settings) -> Inverse:
    """Lemma E.3 with Y = σe_1e_1ᵀ."""
    m, n = shape
    samples = QUICK_SAMPLES if settings.quick else SAMPLES
    z = noise.normal((samples, m, n), seed=settings.first_seed, stream=m, dtype=F64)
    y = torch.zeros(shape, dtype=F64)
    y[0, 0] = shift
    sides = theory.inverse_wishart(y, z)
    entries = torch.linalg.inv((z + y) @ (z + y).mT).diagonal(dim1=-2, dim2=-1) / sides.right
    first, others = entries[:, 0], entries[:, 1:].mean(-1)
    root = math.sqrt(samples)
    return Inverse(
        shape,
        shift,
        (sides.left / sides.right).item(),
        first.mean().item(),
        shifted_entry(shape, shift) * (n - m - 1),
        first.std().item() / root,
        others.mean().item() if m > 1 else math.nan,
        others.std().item() / root if m > 1 else math.nan,
    )


def shifted_entry(shape: tuple[int, int], shift: float) -> float:
    """E[(A⁻¹)_11] for Y = σe_1e_1ᵀ: E.2 in the mean over λ = σ²B, B the share of e_1 left over.

    With B = sin²θ its law is sin^{n−m}θ·cos^{m−2}θ dθ, smooth for m ≥ 2.
    """
    m, n = shape
    if m == 1:
        return inverse_moment(n, shift**2)
    v, weights = _legendre(40)
    theta = v * math.pi / 2
    law = torch.sin(theta) ** (n - m) * torch.cos(theta) ** (m - 2) * weights
    law = law / law.sum()
    moments = [inverse_moment(n - m + 1, shift**2 * b) for b in torch.sin(theta).square().tolist()]
    return (law * torch.tensor(moments, dtype=F64)).sum().item()


def _legendre(panels: int = PANELS) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]: five-point Gauss–Legendre on equal panels."""
    a = math.sqrt(5 - 2 * math.sqrt(10 / 7)) / 3
    b = math.sqrt(5 + 2 * math.sqrt(10 / 7)) / 3
    wa, wb = (322 + 13 * math.sqrt(70)) / 900, (322 - 13 * math.sqrt(70)) / 900
    nodes = torch.tensor([-b, -a, 0.0, a, b], dtype=F64)
    weights = torch.tensor([wb, wa, 128 / 225, wa, wb], dtype=F64)
    centers = (torch.arange(panels, dtype=F64) + 0.5) / panels
    half = 0.5 / panels
    return (centers[:, None] + half * nodes).flatten(), (half * weights).repeat(panels)


# ------------------------------------------------------------------ what is checked


def checks(
    hessians: list[tuple[float, float, float]],
    moments: dict[tuple[int, float], tuple[float, float]],
    inverses: list[Inverse],
) -> tuple[Check, ...]:
    """The inequalities, the second evaluations, and equality where the lemmas have it."""
    outside = [o for _, _, o in hessians if not math.isnan(o)]
    central = [share for (_, x), (share, _) in moments.items() if x == 0]
    # Picking the largest of m eigenvalues of a mean costs about as much again as its error.
    above = [
        (i.largest - 1) / max(i.error, i.free_error if i.shape[0] > 1 else 0) for i in inverses
    ]
    free = [abs(i.free - 1) / i.free_error for i in inverses if i.shape[0] > 1]
    exact = [abs(i.shifted - i.exact) / i.error for i in inverses]
    tight = [abs(i.shifted - 1) / i.error for i in inverses if i.shift == 0]
    return (
        Check("E.1: largest left/right", worst([s for s, _, _ in hessians]), "≤", 1 + 1e-12),
        Check(
            "E.1: largest distance to differences", worst([a for _, a, _ in hessians]), "≤", AGREE
        ),
        Check("E.1, off the row space: smallest left/right", min(outside), "≥", 1 - 1e-9),
        Check("E.2: largest left/right", worst([s for s, _ in moments.values()]), "≤", 1 + 1e-12),
        Check(
            "E.2: largest |left/quadrature − 1|",
            worst([abs(a) for _, a in moments.values()]),
            "≤",
            1e-9,
        ),
        Check("E.2, λ = 0: smallest left/right", min(central), "≥", 1 - 1e-12),
        Check("E.3: (largest left/right − 1)/error", worst(above), "≤", 2 * ERRORS),
        Check("E.3, central rows: |(n−m−1)·entry − 1|/error", worst(free), "≤", ERRORS),
        Check("E.3, no shift: |(n−m−1)·entry − 1|/error", worst(tight), "≤", ERRORS),
        Check("E.3, shifted row: |entry − quadrature|/error", worst(exact), "≤", ERRORS),
    )


def _moment_table(moments: dict[tuple[int, float], tuple[float, float]]) -> Table:
    rows = tuple(
        (k, *(moments[k, x][0] for x in NONCENTRALITIES)) for k in sorted({k for k, _ in moments})
    )
    columns = ("k", *(f"λ = {x:g}" for x in NONCENTRALITIES))
    return Table("E.2: (k−2)·E[1/χ²_k(λ)], at most 1", columns, rows)


def _inverse_table(inverses: list[Inverse]) -> Table:
    rows = tuple(
        (
            "{}×{}".format(*i.shape),
            i.shift,
            i.largest,
            f"{i.shifted:.4f} ± {3 * i.error:.4f}",
            i.exact,
            i.free if i.shape[0] > 1 else "",
        )
        for i in inverses
    )
    entries = ("shifted row ± 3 errors", "by quadrature", "central rows")
    columns = ("shape", "shift", "largest eigenvalue", *entries)
    return Table("E.3: (n−m−1)·E[((Z+Y)(Z+Y)ᵀ)⁻¹], at most 1", columns, rows)


def _figure(
    moments: dict[tuple[int, float], tuple[float, float]], inverses: list[Inverse]
) -> Figure:
    x = [v for v in NONCENTRALITIES if v > 0]
    lines = tuple(
        Series(f"k = {k}", x, [moments[k, v][0] for v in x], style=style)
        for k, style in zip(DEGREES, (0, 2, 3, 4), strict=True)
    )
    first = Panel("E.2: (k−2)·E[1/χ²_k(λ)]", "λ", "share of the bound", lines, x_scale="log")
    shares = list[Series]()
    for shape, style in zip(WISHART_SHAPES, (0, 2, 4), strict=True):
        found = [i for i in inverses if i.shape == shape]
        at = [i.shift for i in found]
        y, low, high = (
            [i.shifted + sign * 3 * i.error for i in found] for sign in (0.0, -1.0, 1.0)
        )
        shares.append(Series("{}×{}".format(*shape), at, y, low, high, style))
    level = Series("the bound", list(SHIFTS), [1.0] * len(SHIFTS), style=BOUND)
    second = Panel(
        "E.3: the shifted row's entry", "shift", "share of the bound", (*shares, level), marked=True
    )
    caption = "Both inverse moments are largest without a shift, where the lemmas are equalities."
    return Figure("shares", "The inverse moments behind β", caption, (first, second))


CLAIM = Claim(
    id="lemmas-wishart",
    title="The lemmas behind the Gaussian smoothing",
    statement=(
        "∇²‖X‖_*[D,D] ≤ Tr Dᵀ(XXᵀ)^{-1/2}D (E.1), E[1/χ²_k(λ)] ≤ 1/(k−2) (E.2) and "
        "E[((Z+Y)(Z+Y)ᵀ)⁻¹] ⪯ I/(n−m−1) (E.3), which make β = 1/√(n−m−1)."
    ),
    place="Lemmas E.1, E.2 and E.3, Appendix E",
    tolerance=(
        "E.1 and E.2 hold to rounding, agree with second differences (1e-6) and quadrature (1e-9), "
        "and are equalities off the row space and at λ = 0; E.3 is an equality on rows without a "
        "shift and the quadrature's value on a shifted one, within 5 standard errors, and is "
        "never passed."
    ),
    run=run,
    seconds=12,
    quick_seconds=3,
)
