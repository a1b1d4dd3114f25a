"""Every refusal names the argument, the value and the remedy, and comes as the right exception."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nucleon import _checks
from nucleon.online import theory
from strategies import FULL, HALF, eps, gram, normal, seeds

ONES = torch.ones(2, 3)
EYE = torch.eye(2)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([[1.0, 2.0]], TypeError, ("torch.Tensor", "list", "torch.as_tensor(s)")),
        (None, TypeError, ("torch.Tensor", "NoneType")),
        (normal(2, 2).numpy(), TypeError, ("torch.Tensor", "ndarray", "torch.as_tensor(s)")),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, ("floating-point", "torch.int64")),
        (torch.ones(2, 2, dtype=torch.bool), TypeError, ("floating-point", "torch.bool")),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, ("real", "complex64", "s.real")),
        (torch.ones(2, 2).to_sparse(), TypeError, ("dense", "s.to_dense()")),
        (torch.ones(3), ValueError, ("two dimensions", "(3,)", "(1, n)")),
        (torch.tensor(1.0), ValueError, ("two dimensions", "()")),
        (torch.tensor([[1.0, math.nan]]), ValueError, ("finite", "1 NaN", "of 2")),
        (torch.tensor([[math.inf], [-math.inf]]), ValueError, ("finite", "2 NaN")),
        (torch.ones(2, 2).to(torch.float8_e5m2), TypeError, ("dtype among", "float8_e5m2")),
    ],
)
def test_matrix_refuses(value, error, words):
    with pytest.raises(error) as caught:
        _checks.matrix("s", value)
    message = str(caught.value)
    assert message.startswith("s must")
    for word in words:
        assert word in message


def test_matrix_names_the_dtypes_it_would_take():
    with pytest.raises(TypeError, match=r"torch\.float32, torch\.float64, got torch\.float16"):
        _checks.matrix("gram", torch.ones(2, 2).half(), dtypes=_checks.FULL_DTYPES)


@pytest.mark.parametrize("shape", [(1, 1), (3, 0), (0, 3), (0, 2, 2), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", FULL + HALF)
def test_matrix_returns_the_same_tensor(shape, dtype):
    value = torch.ones(shape, dtype=dtype)
    assert _checks.matrix("s", value) is value


def test_matrix_takes_views_parameters_and_extremes():
    for value in (
        torch.ones(4, 6)[::2, 1::3],
        torch.ones(1, 1).expand(3, 5),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.full((2, 2), torch.finfo(torch.float32).max),
        torch.full((2, 2), torch.finfo(torch.float32).smallest_normal / 8),
    ):
        assert _checks.matrix("s", value) is value


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
    _checks.symmetric("a", factor @ factor.mT)
    # Another order of summation above and below the diagonal, as some BLAS have it.
    other = (factor.flip(-1) @ factor.flip(-1).mT).triu()
    _checks.symmetric("a", other + (factor @ factor.mT).tril(-1))


def test_one_asymmetric_matrix_of_a_stack_is_enough():
    a = torch.eye(3).repeat(4, 1, 1)
    a[2, 0, 1] = 1e-2
    with pytest.raises(ValueError, match=r"largest asymmetry is 0\.01"):
        _checks.symmetric("a", a)
    # A large neighbour must not hide it.
    a[0] *= 1e30
    with pytest.raises(ValueError, match="symmetric"):
        _checks.symmetric("a", a)


@pytest.mark.parametrize("dtype", FULL)
def test_subnormal_rounding_is_rounding(dtype):
    """A unit of the smallest subnormal is what rounding leaves down there, whatever eps says."""
    unit = torch.finfo(dtype).smallest_normal * eps(dtype)
    a = torch.full((2, 2), 1000 * unit, dtype=dtype)
    a[0, 1] += unit
    _checks.symmetric("a", a)


@pytest.mark.parametrize("dtype", FULL)
def test_a_subnormal_gram_matrix_is_semidefinite(dtype):
    """Rounded to whole units, the Gram matrix of a column has eigenvalues far below 0."""
    unit = torch.finfo(dtype).smallest_normal * eps(dtype)
    column = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None] ** 0.5
    a = ((column @ column.mT).round() * unit).to(dtype)
    assert torch.linalg.eigvalsh(a.double() / unit).min() < -0.1
    _checks.positive_semidefinite("a", a)
    assert (theory.preconditioner_trace(a, gradient_bound=0.0) >= 0).all()
    with pytest.raises(ValueError, match="semidefinite"):
        _checks.positive_semidefinite("a", torch.diag(a.new_tensor([1.0, -1.0])))


@pytest.mark.parametrize(
    ("value", "size", "words"),
    [
        (ONES, None, ("square", "(2, 3)", "L @ L.mT")),
        (torch.ones(4, 3, 2), None, ("square", "(4, 3, 2)")),
        (EYE, 3, ("3×3", "(2, 2)")),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), None, ("symmetric", "1")),
    ],
)
def test_symmetric_refuses(value, size, words):
    with pytest.raises(ValueError) as caught:
        _checks.symmetric("smoothing", value, size=size)
    for word in ("smoothing must", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (torch.eye(3), ValueError, ("2×2", "rows", "(3, 3)")),
        (EYE.double(), TypeError, ("float64", "float32", "smoothing.to(torch.float32)")),
        (EYE.bfloat16(), TypeError, ("bfloat16", "smoothing.to(torch.float32)")),
        (EYE.repeat(3, 1, 1), ValueError, ("(3,)", "()", "leading dimensions")),
        (torch.diag(torch.tensor([1.0, -1.0])), ValueError, ("semidefinite", "L @ L.mT")),
        ([[1.0, 0.0], [0.0, 1.0]], TypeError, ("smoothing", "torch.Tensor")),
    ],
)
def test_smoothing_refuses(value, error, words):
    with pytest.raises(error) as caught:
        _checks.smoothing(value, ONES)
    for word in words:
        assert word in str(caught.value)


def test_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"smoothing is on meta but s is on cpu; .*\.to\('cpu'\)"):
        _checks.same("smoothing", EYE.to("meta"), "s", ONES)


@pytest.mark.parametrize("dtype", HALF)
def test_half_matrices_take_a_float32_smoothing(dtype):
    s = ONES.to(dtype)
    assert _checks.smoothing(EYE, s) is EYE
    with pytest.raises(TypeError, match="float32"):
        _checks.smoothing(EYE.to(dtype), s)
    with pytest.raises(TypeError, match="float32"):
        _checks.smoothing(EYE.double(), s)


@pytest.mark.parametrize(
    ("shape", "other", "fits"),
    [
        ((), (), True),
        ((), (2, 3), True),
        ((3,), (2, 3), True),
        ((1, 3), (2, 3), True),
        ((), (0,), True),
        ((1,), (0,), True),
        ((2,), (), False),
        ((2,), (1,), False),
        ((2,), (3,), False),
        ((2, 3), (3,), False),
        ((0,), (1,), False),
    ],
)
def test_broadcasting_goes_one_way(shape, other, fits):
    shape, other = torch.Size(shape), torch.Size(other)
    if fits:
        _checks.broadcastable("smoothing", shape, "s", other)
        return
    with pytest.raises(ValueError) as caught:
        _checks.broadcastable("smoothing", shape, "s", other)
    for word in ("smoothing", str(tuple(shape)), str(tuple(other))):
        assert word in str(caught.value)


INF, NAN = math.inf, math.nan
WRONG_TYPES = (True, "1", None, torch.tensor(1.0))


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (_checks.positive, (1, 2.5, 5e-324), (0, -1.0, INF, NAN)),
        (_checks.nonnegative, (0, 0.0, 3), (-1e-300, INF, -INF, NAN)),
        (_checks.fraction, (0.5, 1e-300), (0, 1, -0.1, 1.1, NAN, INF)),
    ],
)
def test_numbers(check, good, bad):
    for value in good:
        result = check("eta", value)
        assert type(result) is float
        assert result == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"eta must .*{value!r}"):
            check("eta", value)
    for value in WRONG_TYPES:
        with pytest.raises(TypeError, match="eta must be a number"):
            check("eta", value)


@pytest.mark.parametrize(
    ("closed", "interval", "zero", "one"),
    [
        ("", r"\(0, 1\)", False, False),
        ("0", r"\[0, 1\)", True, False),
        ("1", r"\(0, 1\]", False, True),
        ("01", r"\[0, 1\]", True, True),
    ],
)
def test_the_ends_of_a_fraction(closed, interval, zero, one):
    for value, fits in ((0, zero), (1, one), (2, False)):
        if fits:
            assert _checks.fraction("discount", value, closed=closed) == value
        else:
            with pytest.raises(ValueError, match=f"discount must lie in {interval}, got {value}"):
                _checks.fraction("discount", value, closed=closed)


def test_counts():
    assert _checks.count("steps", 1) == 1
    assert _checks.count("steps", 0, minimum=0) == 0
    for value, minimum in ((0, 1), (-1, 0), (4, 5)):
        with pytest.raises(ValueError, match=f"steps must be an integer ≥ {minimum}, got {value}"):
            _checks.count("steps", value, minimum=minimum)
    for value in (1.0, True, "3", None):
        with pytest.raises(TypeError, match=r"steps must be an integer ≥ 1, got"):
            _checks.count("steps", value)


def test_choices():
    assert _checks.choice("method", "svd", ("svd", "qdwh")) == "svd"
    for value in ("SVD", "", None, 3, ["svd"]):
        with pytest.raises(ValueError, match=r"method must be one of 'svd', 'qdwh', got"):
            _checks.choice("method", value, ("svd", "qdwh"))


def test_a_rank_deficient_gram_passes_as_smoothing():
    """Its diagonal is a sum of squares: rounding cannot make it negative."""
    factor = normal(6, 2, dtype=torch.float32)
    _checks.smoothing(gram(factor), torch.ones(6, 3))
    _checks.smoothing(torch.zeros(6, 6), torch.ones(6, 3))
