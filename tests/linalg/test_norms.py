"""The two norms and the projection onto the ball, over every dtype, rank, condition and scale.

The oracle is NumPy in float64 on exactly rescaled matrices. The number of examples is that of the
hypothesis profile, so that `soak` looks further.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg import nuclear_norm, operator_norm, project_operator_ball
from nucleon.linalg.norms import operator_norm_bound, surely_within
from strategies import (
    EMPTY,
    F64,
    FULL,
    HALF,
    ends,
    eps,
    normal,
    operator_norms,
    orthogonal,
    ranged,
    ranked,
    seeds,
    shapes,
    smallest,
    times_power_of_two,
    unit,
    whole_range,
    with_singular_values,
)

few = settings(max_examples=settings.default.max_examples // 5)
by_dtype = pytest.mark.parametrize("dtype", FULL + HALF)
norms = pytest.mark.parametrize("norm", [operator_norm, nuclear_norm])


def table(dtype):
    """Shape × rank × condition × scale."""
    least, most = ends(dtype)
    tops = (least + 2, math.frexp(torch.finfo(dtype).tiny)[1], 0, most)
    for shape, share, log_cond, top in product(
        ((1, 5), (6, 6), (4, 9), (9, 4)), (0, 0.5, 1), (0, 3, 12), tops
    ):
        yield ranked(shape, math.ceil(share * min(shape)), log_cond, top, dtype, seed=shape[0])


def check_norms(x):
    """One SVD in float64, one rounding; infinite just where the norm is no number of the dtype."""
    scaled, e = unit(x)
    sigma = np.linalg.svd(scaled.numpy(), compute_uv=False)
    info = torch.finfo(x.dtype)
    relative = 4 * sum(x.shape) * eps(torch.float64) + info.eps
    for function, value in ((operator_norm, sigma[0]), (nuclear_norm, sigma.sum())):
        result = function(x)
        assert result.dtype == x.dtype and result.shape == ()
        if math.frexp(value * (1 - relative))[1] + e > math.frexp(info.max)[1]:
            assert result == math.inf
        elif math.frexp(value * (1 + relative))[1] + e <= math.frexp(info.max)[1]:
            expected = math.ldexp(value, e)
            assert abs(result.item() - expected) <= relative * expected + smallest(x.dtype)
    if x.dtype in FULL:
        rounding = 4 * sum(x.shape) * eps(x.dtype)  # of its products
        bound, least = operator_norm_bound(x).double().item(), sigma[0] * (1 - rounding)
        assert bound == math.inf or bound >= math.ldexp(least, e) - smallest(x.dtype)
        bound = operator_norm_bound(scaled.to(x.dtype)).item()  # m^(1/4N) above at most
        assert least <= bound <= sigma[0] * (1 + 1e-3) + 2 * info.tiny


def check_projection(x, radius):
    """U min(Σ, r) Vᵀ, its entries rounded once, below the normal numbers by half the smallest."""
    p = project_operator_ball(x, radius)
    assert p.dtype == x.dtype and torch.isfinite(p).all()
    m, n = x.shape
    scale, e = unit(x)
    u, sigma, vt = np.linalg.svd(scale.numpy(), full_matrices=False)
    power = math.frexp(radius)[1] - e
    limit = math.ldexp(radius, -e) if power < 1000 or not radius else 1e300
    expected = torch.from_numpy((u * np.minimum(sigma, limit)) @ vt)
    result = times_power_of_two(p.double(), -e)
    slack = 1e-9 + math.sqrt(min(m, n)) * eps(x.dtype)
    absolute = math.ldexp(math.sqrt(m * n) * smallest(x.dtype), -e)
    assert operator_norms(result) <= limit * (1 + slack) + absolute
    assert operator_norms(result - expected) <= slack * min(limit, sigma[0]) + absolute + 1e-13


@by_dtype
@few
@given(data=st.data())
def test_every_input(dtype, data):
    """Radii about ‖X‖_op and anywhere in the range."""
    x = data.draw(ranged(dtype))
    check_norms(x)
    radius = 2.0 ** data.draw(whole_range(dtype))
    if data.draw(st.booleans()) and x.any():
        radius = min(x.double().abs().max().item() * data.draw(st.floats(0.1, 3)), 1e308)
    check_projection(x, radius)


@by_dtype
def test_the_table(dtype):
    for x in table(dtype):
        check_norms(x)
        for radius in (0.0, smallest(dtype), 1.0, x.double().abs().max().item() / 2):
            check_projection(x, radius)


@settings(max_examples=30)
@given(shape=shapes, k=st.integers(-90, 90), seed=seeds)
def test_duality_invariance_and_powers_of_two(shape, k, seed):
    """‖X‖_* = ⟨X, UVᵀ⟩ ≥ ⟨X, Y⟩ for ‖Y‖_op ≤ 1, ‖X‖_op ≤ ‖X‖_F ≤ ‖X‖_*, rotations, transposes."""
    x, y = normal(*shape, seed=seed), normal(*shape, seed=seed + 1)
    nuclear, operator = nuclear_norm(x), operator_norm(x)
    slack = 1e-13 * min(shape) * nuclear
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert abs((x * (u @ vh)).sum() - nuclear) <= slack
    assert (x * y).sum() <= nuclear * operator_norm(y) + slack * operator_norm(y)
    assert operator - slack <= torch.linalg.matrix_norm(x) <= nuclear + slack
    left, right = orthogonal(shape[0], shape[0], seed), orthogonal(shape[1], shape[1], seed + 2)
    for moved in (left @ x @ right, x.mT, -x):
        assert abs(nuclear_norm(moved) - nuclear) <= slack
        assert abs(operator_norm(moved) - operator) <= slack
    assert nuclear_norm(x * 2.0**k) == nuclear * 2.0**k
    assert operator_norm(x * 2.0**k) == operator * 2.0**k


@settings(max_examples=30)
@given(shape=shapes, k=st.integers(-990, 990), seed=seeds)
def test_a_norm_is_surely_within_its_limit_or_may_be_above(shape, k, seed):
    x = times_power_of_two(normal(3, *shape, seed=seed), k)
    norm = operator_norm(x)
    assert surely_within(x, norm * (1 + 1e-9)) and surely_within(x, norm.max().item() * 2)
    assert not surely_within(x, norm)  # too near to tell
    for limit in (norm[0].item() * (1 - 1e-9), norm * torch.tensor([1.5, 0.5, 1.5]), 0 * norm):
        assert not surely_within(x[:1] if isinstance(limit, float) else x, limit)
    assert surely_within(0 * x, 0 * norm)


@norms
def test_stacks_empty_matrices_and_the_largest_number(norm):
    x = normal(2, 3, 4, 5) * torch.logspace(-290, 290, 6, dtype=F64).reshape(2, 3, 1, 1)
    x[1, 1] = 0
    for i, j in product(range(2), range(3)):
        torch.testing.assert_close(norm(x)[i, j], norm(x[i, j]), rtol=1e-14, atol=0)
    for shape in EMPTY:
        assert torch.equal(norm(torch.zeros(shape)), torch.zeros(shape[:-2]))
    for dtype in FULL:
        for value in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, smallest(dtype)):
            single = torch.zeros(3, 4, dtype=dtype)
            single[1, 2] = -value
            assert norm(single) == value


# --- the ball ------------------------------------------------------------------------------------


def test_a_matrix_inside_comes_back_unchanged_and_unaliased():
    x = with_singular_values((6, 4), torch.logspace(0, -5, 4, dtype=F64))
    projected = project_operator_ball(x, 1.0 + 1e-12)
    assert torch.equal(projected, x)
    assert projected.data_ptr() != x.data_ptr()
    for shape in EMPTY:
        assert project_operator_ball(torch.zeros(shape)).shape == shape


@settings(max_examples=25)
@given(shape=shapes, size=st.floats(0.1, 1e4), seed=seeds)
def test_the_projection_is_the_nearest_point(shape, size, seed):
    """⟨x − p, z − p⟩ ≤ 0 over the ball: its support function at x − p is the nuclear norm of that,
    attained at p."""
    x = size * normal(*shape, seed=seed)
    p = project_operator_ball(x)
    normal_cone = (x - p).numpy()
    support = np.linalg.norm(normal_cone, "nuc")
    assert support - np.sum(normal_cone * p.numpy()) <= 1e-11 * (1 + size) * 30


@pytest.mark.parametrize(
    ("function", "arguments", "error", "words"),
    [
        (operator_norm, ([[1.0]],), TypeError, "x must be a torch.Tensor"),
        (nuclear_norm, (torch.ones(2),), ValueError, "x must have at least two dimensions"),
        (project_operator_ball, (torch.full((2, 2), math.nan),), ValueError, "x must be finite"),
        (project_operator_ball, (torch.ones(2, 2), -1.0), ValueError, "radius must be a finite"),
        (project_operator_ball, (torch.ones(2, 2), math.inf), ValueError, "radius must be a fini"),
    ],
)
def test_bad_arguments(function, arguments, error, words):
    with pytest.raises(error, match=words):
        function(*arguments)
