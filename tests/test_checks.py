"""Every refusal names the argument, the value and the remedy, and comes as the right exception."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nucleon import _checks
from nucleon.online import theory
from strategies import FULL, HALF, eps, gram, normal, seeds

ONES, EYE = torch.ones(2, 3), torch.eye(2)
INF, NAN = math.inf, math.nan
matrix, smoothing = partial(_checks.matrix, "s"), partial(_checks.acting_on, "smoothing", s=ONES)
symmetric = partial(_checks.symmetric, "smoothing")
one_asymmetric = torch.stack([1e30 * torch.eye(3), torch.eye(3), torch.eye(3)])
one_asymmetric[2, 0, 1] = 1e-2  # a large neighbour must not hide it


@pytest.mark.parametrize(
    ("check", "error", "words"),
    [
        (partial(matrix, [[1.0]]), TypeError, ("s must", "list", "torch.as_tensor(s)")),
        (partial(matrix, ONES.numpy()), TypeError, ("ndarray", "torch.as_tensor(s)")),
        (partial(matrix, ONES.long()), TypeError, ("s must", "torch.int64", "s.to(torch.float32)")),
        (partial(matrix, ONES.cfloat()), TypeError, ("s must", "dtype among", "complex64")),
        (partial(matrix, ONES.to_sparse()), TypeError, ("s must be dense", "torch.sparse_coo")),
        (partial(matrix, ONES[0]), ValueError, ("s must", "two dimensions", "(3,)", "(1, n)")),
        (partial(matrix, ONES * NAN), ValueError, ("s must be finite", "6 NaN", "of 6")),
        (partial(matrix, ONES.to(torch.float8_e5m2)), TypeError, ("dtype among", "float8_e5m2")),
        (
            partial(matrix, ONES.half(), dtypes=_checks.FULL_DTYPES),
            TypeError,
            ("torch.float32, torch.float64, got torch.float16",),
        ),
        (partial(symmetric, ONES), ValueError, ("smoothing must be square", "(2, 3)", "L @ L.mT")),
        (partial(symmetric, EYE, size=3), ValueError, ("smoothing must", "3×3", "(2, 2)")),
        (partial(symmetric, EYE + EYE[0]), ValueError, ("smoothing must be symmetric", "1")),
        (partial(symmetric, one_asymmetric), ValueError, ("asymmetry is 0.01",)),
        (partial(smoothing, torch.eye(3)), ValueError, ("2×2", "rows", "(3, 3)")),
        (partial(smoothing, EYE.double()), TypeError, ("float64", "smoothing.to(torch.float32)")),
        (partial(smoothing, EYE.repeat(3, 1, 1)), ValueError, ("(3,)", "()", "leading dimensions")),
        (partial(smoothing, torch.diag(EYE[0] - EYE[1])), ValueError, ("semidefinite", "L @ L.mT")),
        (partial(smoothing, EYE.half(), s=ONES.half()), TypeError, ("float32",)),
        (partial(smoothing, EYE.double(), s=ONES.half()), TypeError, ("float32",)),
        (partial(smoothing, EYE, side="columns"), ValueError, ("3×3", "columns", "(2, 2)")),
        (
            partial(_checks.same, "smoothing", EYE.to("meta"), "s", ONES),
            ValueError,
            ("smoothing is on meta but s is on cpu", ".to('cpu')"),
        ),
        (partial(_checks.count, "steps", 0), ValueError, ("steps must be an integer ≥ 1, got 0",)),
        (partial(_checks.count, "steps", -1, minimum=0), ValueError, ("≥ 0, got -1",)),
        *(
            (partial(_checks.count, "steps", value), TypeError, ("steps must be an integer ≥ 1",))
            for value in (1.0, True, "3", None)
        ),
        *(
            (
                partial(_checks.choice, "method", value, ("svd", "qdwh")),
                ValueError,
                ("method must be one of 'svd', 'qdwh', got",),
            )
            for value in ("SVD", "", None, 3, ["svd"])
        ),
    ],
)
def test_refusals(check, error, words):
    with pytest.raises(error) as raised:
        check()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (0, 3), (0, 2, 2), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", FULL + HALF)
def test_what_fits_comes_back(shape, dtype):
    value = torch.ones(shape, dtype=dtype)
    for fitting in (value, value.mT, value * torch.finfo(dtype).max, torch.nn.Parameter(value)):
        assert _checks.matrix("s", fitting) is fitting
    assert smoothing(EYE, s=ONES.half()) is EYE
    assert _checks.count("steps", 0, minimum=0) == 0
    assert _checks.choice("method", "svd", ("svd", "qdwh")) == "svd"


@pytest.mark.parametrize("dtype", FULL + HALF)
@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**40])
def test_symmetry_is_judged_relative_to_the_largest_entry(dtype, factor):
    if dtype is torch.float16:
        factor = factor ** (1 / 8)
    m = 3
    a = torch.full((2, m, m), 0.5, dtype=torch.float64)
    a[1, 0, 1] += 4 * m * eps(dtype)  # half of what is allowed for the entry 0.5
    assert _checks.symmetric("a", (a * factor).to(dtype)).shape == (2, m, m)
    a[1, 0, 1] += 16 * m * eps(dtype)
    with pytest.raises(ValueError, match=r"a must be symmetric .* pass \(a \+ a\.mT\) / 2"):
        _checks.symmetric("a", (a * factor).to(dtype))


@given(m=st.integers(1, 40), n=st.integers(1, 60), dtype=st.sampled_from(FULL), seed=seeds)
def test_gram_products_are_symmetric_enough(m, n, dtype, seed):
    factor = normal(m, n, seed=seed, dtype=dtype)
    smoothing(gram(factor), s=factor)
    # Another order of summation above and below the diagonal, as some BLAS have it.
    other = (factor.flip(-1) @ factor.flip(-1).mT).triu()
    _checks.symmetric("a", other + (factor @ factor.mT).tril(-1))


@pytest.mark.parametrize("dtype", FULL)
def test_the_rounding_of_subnormal_numbers_is_rounding(dtype):
    """Rounded to whole units, the Gram matrix of a column has eigenvalues far below 0."""
    unit = torch.finfo(dtype).smallest_normal * eps(dtype)
    column = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None] ** 0.5
    a = ((column @ column.mT).round() * unit).to(dtype)
    assert torch.linalg.eigvalsh(a.double() / unit).min() < -0.1
    _checks.positive_semidefinite("a", a)
    assert (theory.preconditioner_trace(a, gradient_bound=0.0) >= 0).all()
    with pytest.raises(ValueError, match="semidefinite"):
        _checks.positive_semidefinite("a", torch.diag(a.new_tensor([1.0, -1.0])))
    a[0, 1] += unit
    _checks.symmetric("a", a)


@pytest.mark.parametrize(
    ("shape", "other", "fits"),
    [
        ((), (2, 3), True),
        ((3,), (2, 3), True),
        ((1, 3), (2, 3), True),
        ((2,), (), False),
        ((2,), (1,), False),
        ((2,), (3,), False),
        ((2, 3), (3,), False),
    ],
)
def test_broadcasting_goes_one_way(shape, other, fits):
    shape, other = torch.Size(shape), torch.Size(other)
    if fits:
        _checks.broadcastable("smoothing", shape, "s", other)
        return
    with pytest.raises(ValueError) as raised:
        _checks.broadcastable("smoothing", shape, "s", other)
    for word in ("smoothing", str(tuple(shape)), str(tuple(other))):
        assert word in str(raised.value)


def fraction(closed):
    return partial(_checks.fraction, closed=closed)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_checks.positive, (1, 2.5, 5e-324), (0, -1.0, INF, NAN)),
        (_checks.nonnegative, (0, 0.0, 3), (-1e-300, INF, -INF, NAN)),
        (_checks.fraction, (0.5, 1e-300), (0, 1, -0.1, 1.1, NAN, INF)),
        (fraction("0"), (0, 0.5), (1, 2)),
        (fraction("1"), (0.5, 1), (0, 2)),
        (fraction("01"), (0, 0.5, 1), (-1, 2)),
    ],
)
def test_numbers(check, good, bad):
    for value in good:
        result = check("eta", value)
        assert type(result) is float and result == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"eta must .*{value!r}"):
            check("eta", value)
    for value in (True, "1", None, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="eta must be a number"):
            check("eta", value)
