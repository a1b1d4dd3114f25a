"""lemmas-wishart: the core of the Gaussian smoothing's constants (Lemmas E.1, E.2 and E.3)."""

import math
from typing import NamedTuple

import torch

from nucleon import noise
from nucleon.claims.base import Check, Claim, Progress, Result, Settings, one_thread, worst
from nucleon.claims.oracle import wishart
from nucleon.claims.played import BOUND, text
from nucleon.claims.shown import Figure, Panel, Series, Table
from nucleon.online import theory

F64 = torch.float64
HESSIAN_SHAPES = ((1, 1), (1, 4), (2, 2), (3, 5), (4, 8))
HESSIANS, QUICK_HESSIANS = 60, 10
DEGREES = (3, 4, 7, 40)
NONCENTRALITIES = (0.0, 1e-3, 0.1, 1.0, 10.0, 100.0, 3000.0)
# n ≥ m+5: from there on the entries of the inverse have a variance, hence an interval.
WISHART_SHAPES = ((1, 6), (2, 8), (3, 9))
SHIFTS = (0.0, 0.5, 2.0, 8.0)
SAMPLES, QUICK_SAMPLES = 100_000, 20_000

# Of a fourth-order second difference with the step 1e-3 of norms of order 10: truncation h⁴·O(1),
# rounding 16·1e-15·10/h².
AGREE = 1e-6
EXACT = 1e-9  # of a quadrature, or of a second decomposition
ERRORS = 5.0  # standard errors


class Hessian(NamedTuple):
    """Lemma E.1 at one X and D."""

    share: float
    """Left/right."""
    apart: float
    """|left − second difference|, and |right/reference's − 1|, the larger."""
    outside: float
    """Left/right for a D off the row space, exactly 1; NaN where X is square."""


class Moment(NamedTuple):
    """Lemma E.2 at one k and λ."""

    degrees: int
    noncentrality: float
    share: float
    """Left/right."""
    apart: float
    """|left/quadrature − 1|."""


class Inverse(NamedTuple):
    """E[((Z+Y)(Z+Y)ᵀ)⁻¹] for a shift of one row, by samples, in units of 1/(n−m−1)."""

    shape: tuple[int, int]
    shift: float
    largest: float
    """The largest eigenvalue of the mean."""
    apart: float
    """|largest/reference's − 1| on the same samples."""
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
    hessians, moments, inverses = list[Hessian](), list[Moment](), list[Inverse]()
    for shape in HESSIAN_SHAPES:
        hessians += [hessian(seed, shape) for seed in seeds]
        progress.advance(1, f"E.1, {text(shape)}")
    for degrees in DEGREES:
        moments += [moment(degrees, noncentrality) for noncentrality in NONCENTRALITIES]
        progress.advance(1, f"E.2, k = {degrees}")
    for shape in WISHART_SHAPES:
        for shift in SHIFTS:
            inverses.append(inverse(shape, shift, settings))
            progress.advance(1, f"E.3, {text(shape)}")
    return Result(
        checks=checks(hessians, moments, inverses),
        tables=(_moment_table(moments), _inverse_table(inverses)),
        figures=(_figure(moments, inverses),),
        records=tuple(found._asdict() for found in (*hessians, *moments, *inverses)),
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
            "which the reference integrates.",
        ),
    )


# ------------------------------------------------------------------ the instances


def hessian(seed: int, shape: tuple[int, int]) -> Hessian:
    """Lemma E.1 at a random X with singular values in [1, 3]."""
    generator = torch.Generator().manual_seed(seed)
    u, _, vt = torch.linalg.svd(torch.randn(shape, dtype=F64, generator=generator))
    m, n = shape
    sigma = 1 + 2 * torch.rand(m, dtype=F64, generator=generator)
    x = (u * sigma) @ vt[:m]
    direction = torch.randn(shape, dtype=F64, generator=generator)
    direction /= direction.norm()
    left, right = theory.nuclear_hessian(x, direction)
    pair = x.numpy(), direction.numpy()
    apart = abs(left.item() - wishart.hessian(*pair))
    bound = abs(right.item() / wishart.hessian_bound(*pair) - 1)
    outside = math.nan
    if n > m:
        away = direction - direction @ vt[:m].mT @ vt[:m]
        off = theory.nuclear_hessian(x, away)
        outside = (off.left / off.right).item()
    return Hessian((left / right).item(), worst([apart, bound]), outside)


def moment(degrees: int, noncentrality: float) -> Moment:
    """Lemma E.2."""
    left, right = theory.inverse_chi_square(degrees, noncentrality)
    again = wishart.inverse_moment(degrees, noncentrality)
    share = (left / right).item()
    return Moment(degrees, noncentrality, share, abs(left.item() / again - 1))


def inverse(shape: tuple[int, int], shift: float, settings: Settings) -> Inverse:
    """Lemma E.3 with Y = σe_1e_1ᵀ."""
    m, n = shape
    samples = QUICK_SAMPLES if settings.quick else SAMPLES
    z = noise.normal((samples, m, n), seed=settings.first_seed, stream=m, dtype=F64)
    y = torch.zeros(shape, dtype=F64)
    y[0, 0] = shift
    sides = theory.inverse_wishart(y, z)
    again = wishart.largest_inverse(y.numpy(), z.numpy()) * (n - m - 1)
    largest = (sides.left / sides.right).item()
    entries = torch.linalg.inv((z + y) @ (z + y).mT).diagonal(dim1=-2, dim2=-1) * (n - m - 1)
    first, others = entries[:, 0], entries[:, 1:].mean(-1)
    root = math.sqrt(samples)
    return Inverse(
        shape,
        shift,
        largest,
        abs(largest / again - 1),
        first.mean().item(),
        wishart.shifted_entry(m, n, shift) * (n - m - 1),
        first.std().item() / root,
        others.mean().item() if m > 1 else math.nan,
        others.std().item() / root if m > 1 else math.nan,
    )


# ------------------------------------------------------------------ what is checked


def checks(
    hessians: list[Hessian], moments: list[Moment], inverses: list[Inverse]
) -> tuple[Check, ...]:
    """The inequalities, the reference's evaluations, and equality where the lemmas have it."""
    outside = [h.outside for h in hessians if not math.isnan(h.outside)]
    central = [m.share for m in moments if m.noncentrality == 0]
    # Picking the largest of m eigenvalues of a mean costs about as much again as its error.
    above = [
        (i.largest - 1) / max(i.error, i.free_error if i.shape[0] > 1 else 0) for i in inverses
    ]
    free = [abs(i.free - 1) / i.free_error for i in inverses if i.shape[0] > 1]
    exact = [abs(i.shifted - i.exact) / i.error for i in inverses]
    tight = [abs(i.shifted - 1) / i.error for i in inverses if i.shift == 0]
    return (
        Check.at_most("E.1: largest left/right", (h.share for h in hessians), 1 + 1e-12),
        Check.at_most(
            "E.1: both sides against the reference's", (h.apart for h in hessians), AGREE
        ),
        Check.at_least("E.1, off the row space: smallest left/right", outside, 1 - 1e-9),
        Check.at_most("E.2: largest left/right", (m.share for m in moments), 1 + 1e-12),
        Check.at_most("E.2: largest |left/quadrature − 1|", (m.apart for m in moments), EXACT),
        Check.at_least("E.2, λ = 0: smallest left/right", central, 1 - 1e-12),
        Check.at_most("E.3: (largest left/right − 1)/error", above, 2 * ERRORS),
        Check.at_most(
            "E.3: left/right against the reference's", (i.apart for i in inverses), EXACT
        ),
        Check.at_most("E.3, central rows: |(n−m−1)·entry − 1|/error", free, ERRORS),
        Check.at_most("E.3, no shift: |(n−m−1)·entry − 1|/error", tight, ERRORS),
        Check.at_most("E.3, shifted row: |entry − quadrature|/error", exact, ERRORS),
    )


def _moment_table(moments: list[Moment]) -> Table:
    shares = {(m.degrees, m.noncentrality): m.share for m in moments}
    return Table.grid(
        "E.2: (k−2)·E[1/χ²_k(λ)], at most 1",
        "k",
        {str(k): k for k in DEGREES},
        {f"λ = {x:g}": x for x in NONCENTRALITIES},
        lambda k, x: shares[k, x],
    )


def _inverse_table(inverses: list[Inverse]) -> Table:
    return Table.listing(
        "E.3: (n−m−1)·E[((Z+Y)(Z+Y)ᵀ)⁻¹], at most 1",
        inverses,
        {
            "shape": lambda i: text(i.shape),
            "shift": lambda i: i.shift,
            "largest eigenvalue": lambda i: i.largest,
            "shifted row ± 3 errors": lambda i: f"{i.shifted:.4f} ± {3 * i.error:.4f}",
            "by quadrature": lambda i: i.exact,
            "central rows": lambda i: i.free if i.shape[0] > 1 else "",
        },
    )


def _figure(moments: list[Moment], inverses: list[Inverse]) -> Figure:
    x = [v for v in NONCENTRALITIES if v > 0]
    values = {(m.degrees, m.noncentrality): m.share for m in moments}
    lines = tuple(
        Series(f"k = {k}", x, [values[k, v] for v in x], style=style)
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
        shares.append(Series(text(shape), at, y, low, high, style))
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
        "E.1 and E.2 hold to rounding, agree with the reference's second differences (1e-6) and "
        "quadrature (1e-9), and are equalities off the row space and at λ = 0; E.3 is the "
        "reference's on the same samples (1e-9), an equality on rows without a shift and the "
        "quadrature's value on a shifted one, within 5 standard errors, and is never passed."
    ),
    run=run,
    seconds=12,
    quick_seconds=3,
)
