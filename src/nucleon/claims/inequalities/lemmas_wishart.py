"""lemmas-wishart: the core of the Gaussian smoothing's constants (Lemmas E.1, E.2 and E.3)."""

import math
from collections.abc import Iterator

import torch

from nucleon import noise
from nucleon.claims.beside import share
from nucleon.claims.engine import Claim, Item, Run, at_least, at_most, cases, label
from nucleon.claims.oracle import lemmas
from nucleon.claims.shown import Figure, Panel, Series, level
from nucleon.online import theory

F64 = torch.float64
HESSIAN_SHAPES = ((1, 1), (1, 4), (2, 2), (3, 5), (4, 8))
HESSIANS = (60, 10)
DEGREES = (3, 4, 7, 40)
NONCENTRALITIES = (0.0, 1e-3, 0.1, 1.0, 10.0, 100.0, 3000.0)
# n ≥ m+5: from there on the entries of the inverse have a variance, hence an interval.
WISHART_SHAPES = ((1, 6), (2, 8), (3, 9))
SHIFTS = (0.0, 0.5, 2.0, 8.0)
SAMPLES = (100_000, 20_000)

# Of a fourth-order second difference with the step 1e-3 of norms of order 10: truncation h⁴·O(1),
# rounding 16·1e-15·10/h².
AGREE = 1e-6
EXACT = 1e-9  # of a quadrature, or of a second decomposition
ERRORS = 5.0  # standard errors


def hessian(seed: int, shape: tuple[int, int]) -> dict[str, float]:
    """Evaluate E.1 at a random X with singular values in [1, 3].

    `off` is left/right for a D off the row space, exactly 1; NaN where X is square.
    """
    generator = torch.Generator().manual_seed(seed)
    u, _, vt = torch.linalg.svd(torch.randn(shape, dtype=F64, generator=generator))
    m, n = shape
    sigma = 1 + 2 * torch.rand(m, dtype=F64, generator=generator)
    x = (u * sigma) @ vt[:m]
    d = torch.randn(shape, dtype=F64, generator=generator)
    d /= d.norm()
    sides, pair = theory.nuclear_hessian(x, d), (x.numpy(), d.numpy())
    left, right = lemmas.hessian(*pair), lemmas.hessian_bound(*pair)
    # A difference has an absolute error, the bound a relative one.
    apart = max(abs(sides.left.item() - left), abs(sides.right.item() / right - 1))
    off = theory.nuclear_hessian(x, d - d @ vt[:m].mT @ vt[:m]) if n > m else None
    return {"share": share(sides), "apart": apart, "off": share(off) if off else math.nan}


def moment(degrees: int, noncentrality: float) -> dict[str, float]:
    """Evaluate E.2."""
    sides = theory.inverse_chi_square(degrees, noncentrality)
    apart = sides.left.item() / lemmas.inverse_moment(degrees, noncentrality) - 1
    return {"share": share(sides), "apart": abs(apart)}


def inverse(run: Run, shape: tuple[int, int], shift: float) -> dict[str, float]:
    """Evaluate E.3 with Y = σe_1e_1ᵀ by samples, in units of 1/(n−m−1).

    `largest` is the largest eigenvalue of the mean, `shifted` the entry of the shifted row and
    `exact` the same by quadrature; `free` is the mean entry of the other rows, exactly 1, NaN where
    there are none. The errors are standard errors.
    """
    m, n = shape
    z = noise.normal((run.pick(SAMPLES), m, n), seed=run.seed, stream=m, dtype=F64)
    y = torch.zeros(shape, dtype=F64)
    y[0, 0] = shift
    largest, unit = share(theory.inverse_wishart(y, z)), n - m - 1
    entries = torch.linalg.inv((z + y) @ (z + y).mT).diagonal(dim1=-2, dim2=-1) * unit
    first, others = entries[:, 0], entries[:, 1:].mean(-1)
    return {
        "largest": largest,
        "apart": abs(largest / (lemmas.largest_inverse(y.numpy(), z.numpy()) * unit) - 1),
        "shifted": first.mean().item(),
        "exact": lemmas.shifted_entry(m, n, shift) * unit,
        "error": first.std().item() / math.sqrt(len(z)),
        "free": others.mean().item(),
        "free_error": others.std().item() / math.sqrt(len(z)),
    }


def measure(run: Run) -> Iterator[Item]:
    hessians = run.each(cases(shape=HESSIAN_SHAPES, seed=run.seeds(HESSIANS)), hessian)
    moments = run.each(cases(degrees=DEGREES, noncentrality=NONCENTRALITIES), moment)
    points = cases(shape=WISHART_SHAPES, shift=SHIFTS)
    inverses = run.each(points, lambda shape, shift: inverse(run, shape, shift))
    several = inverses.where(lambda i: i.shape[0] > 1)
    yield at_most("E.1: largest left/right", hessians.column("share"), 1 + 1e-12)
    yield at_most("E.1: both sides against the reference's", hessians.column("apart"), AGREE)
    off = hessians.where(lambda h: h.shape[0] < h.shape[1]).column("off")
    yield at_least("E.1, off the row space: smallest left/right", off, 1 - 1e-9)
    yield at_most("E.2: largest left/right", moments.column("share"), 1 + 1e-12)
    yield at_most("E.2: largest |left/quadrature − 1|", moments.column("apart"), EXACT)
    central = moments.where(noncentrality=0.0).column("share")
    yield at_least("E.2, λ = 0: smallest left/right", central, 1 - 1e-12)
    # Picking the largest of m eigenvalues of a mean costs about as much again as its error.
    above = [(i.largest - 1) / max(i.error, i.free_error) for i in several]
    above += [(i.largest - 1) / i.error for i in inverses.where(lambda i: i.shape[0] == 1)]
    yield at_most("E.3: (largest left/right − 1)/error", above, 2 * ERRORS)
    yield at_most("E.3: left/right against the reference's", inverses.column("apart"), EXACT)
    free = [abs(i.free - 1) / i.free_error for i in several]
    yield at_most("E.3, central rows: |(n−m−1)·entry − 1|/error", free, ERRORS)
    tight = [abs(i.shifted - 1) / i.error for i in inverses.where(shift=0.0)]
    yield at_most("E.3, no shift: |(n−m−1)·entry − 1|/error", tight, ERRORS)
    exact = [abs(i.shifted - i.exact) / i.error for i in inverses]
    yield at_most("E.3, shifted row: |entry − quadrature|/error", exact, ERRORS)

    for row in moments:
        row.at = f"λ = {row.noncentrality:g}"
    yield moments.grid("E.2: (k−2)·E[1/χ²_k(λ)], at most 1", "degrees", "at", "share")
    lines = [level("the bound", SHIFTS)]
    for shape, style in zip(WISHART_SHAPES, (0, 2, 4), strict=True):
        shifted = inverses.where(shape=shape)
        y, low, high = ([i.shifted + end * i.error for i in shifted] for end in (0.0, -3.0, 3.0))
        lines.append(Series(label(shape), shifted.column("shift"), y, low, high, style))
    panel = Panel("shifted row's entry", "shift", "share of the bound", tuple(lines), marked=True)
    caption = "The inverse moment is largest without a shift, where E.2 and E.3 are equalities."
    yield Figure("shares", "The inverse moments behind β", caption, (panel,))
    yield """
        E.3: with one row shifted by σ the others stay central, and their entries of the expected
        inverse are exactly 1/(n−m−1), whatever σ: the bound is attained. The shifted row's entry is
        E.2 at k = n−m+1 and λ = σ²B, B ~ Beta((n−m+1)/2, (m−1)/2).
    """


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
    measure=measure,
    seconds=(5, 1),
)
