"""The two norms against NumPy, duality and exact cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg import nuclear_norm, operator_norm
from strategies import (
    EMPTY,
    F64,
    FULL,
    HALF,
    eps,
    exponents,
    geometric,
    normal,
    orthogonal,
    seeds,
    shapes,
    times_power_of_two,
    with_singular_values,
    work_dtype,
)

NORMS = {operator_norm: 2, nuclear_norm: "nuc"}
norms = pytest.mark.parametrize("norm", NORMS)


def rounding(x, dtype):
    """An SVD moves each singular value by a modest multiple of eps·σ_max, here 10·√(mn) of them,
    min(m, n) of which add up; a half-precision result is rounded once more."""
    m, n = x.shape[-2:]
    return min(m, n) * 10 * math.sqrt(m * n) * eps(work_dtype(dtype)) + eps(dtype)


@norms
@settings(max_examples=40)
@given(
    shape=shapes,
    dtype=st.sampled_from(FULL + HALF),
    log_cond=st.floats(0, 12),
    data=st.data(),
    seed=seeds,
)
def test_against_numpy_at_any_rank_condition_and_scale(norm, shape, dtype, log_cond, data, seed):
    sigma = geometric(min(shape), log_cond, data.draw(st.integers(0, min(shape))))
    # The nuclear norm of 17 unit values must still be representable.
    power = min(data.draw(exponents(dtype)), math.floor(math.log2(torch.finfo(dtype).max)) - 5)
    x = times_power_of_two(with_singular_values(shape, sigma, seed).to(dtype), power)
    found = norm(x)
    assert found.dtype == dtype
    assert found.shape == ()
    # NumPy at unit scale: the float64 range is as wide as the largest scale here.
    back = times_power_of_two(x.double(), -power)
    expected = np.linalg.norm(back.numpy(), NORMS[norm])
    # Where the norm itself is subnormal a unit of the smallest subnormal is its rounding.
    unit = times_power_of_two(torch.tensor(torch.finfo(dtype).tiny * eps(dtype), dtype=F64), -power)
    error = abs(times_power_of_two(found.double(), -power).item() - expected)
    assert error <= rounding(x, dtype) * expected + unit.item()


@norms
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("end", ["max", "tiny", "subnormal"])
def test_the_ends_of_the_range(norm, dtype, end):
    info = torch.finfo(dtype)
    value = {"max": info.max, "tiny": info.tiny, "subnormal": info.tiny * info.eps}[end]
    x = torch.zeros(3, 4, dtype=dtype)
    x[1, 2] = -value
    assert norm(x).item() == value


@norms
@settings(max_examples=20)
@given(shape=shapes, dtype=st.sampled_from(FULL), k=st.integers(-90, 90), seed=seeds)
def test_powers_of_two_come_out_exactly(norm, shape, dtype, k, seed):
    x = normal(*shape, seed=seed, dtype=dtype)
    x = torch.where(x.abs() < 1e-3, 0.5, x)
    assert norm(x * 2.0**k) == norm(x) * 2.0**k


@settings(max_examples=30)
@given(shape=shapes, seed=seeds)
def test_duality_and_invariance(shape, seed):
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


@norms
def test_closed_cases(norm):
    diagonal = torch.diag(torch.tensor([3.0, -4.0, 0.0], dtype=F64))
    assert norm(diagonal).item() == pytest.approx(4.0 if norm is operator_norm else 7.0, rel=1e-15)
    vector = torch.tensor([[3.0, 4.0]], dtype=F64)  # one row: the Euclidean length
    assert norm(vector).item() == pytest.approx(5.0, rel=1e-15)
    assert norm(vector.mT).item() == pytest.approx(5.0, rel=1e-15)
    assert norm(torch.zeros(3, 4)).item() == 0


@norms
@pytest.mark.parametrize("shape", EMPTY)
def test_matrices_without_entries(norm, shape):
    assert torch.equal(norm(torch.zeros(shape)), torch.zeros(shape[:-2]))


@norms
def test_a_stack_is_its_matrices(norm):
    x = normal(2, 3, 4, 5) * torch.logspace(-290, 290, 6, dtype=F64).reshape(2, 3, 1, 1)
    x[1, 1] = 0
    found = norm(x)
    assert found.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(found[i, j], norm(x[i, j]), rtol=1e-14, atol=0)


@norms
@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (1.0, TypeError, "x must be a torch.Tensor"),
        (torch.ones(2, 2).int(), TypeError, "x must hold floating-point"),
        (torch.ones(2, 2).cfloat(), TypeError, "x must be real"),
        (torch.ones(2, 2).to_sparse(), TypeError, "x must be dense"),
        (torch.ones(2), ValueError, "x must have at least two dimensions"),
        (torch.full((2, 2), math.nan), ValueError, "x must be finite"),
        (torch.full((2, 2), -math.inf), ValueError, "x must be finite"),
    ],
)
def test_bad_input(norm, x, error, words):
    with pytest.raises(error, match=words):
        norm(x)
