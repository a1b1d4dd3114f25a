"""A^(-1/2) against NumPy, SciPy and 60-digit arithmetic."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nucleon.linalg import inverse_sqrt
from nucleon.linalg.roots import METHODS, coupled_inverse_sqrt, coupled_steps, floor, psd_eigh
from strategies import (
    F64,
    FULL,
    HALF,
    eps,
    geometric,
    gram,
    normal,
    operator_norms,
    orthogonal,
    seeds,
    symmetrized,
    times_power_of_two,
    with_eigenvalues,
    work_dtype,
)

sizes = st.sampled_from([1, 2, 5, 17])
full = st.sampled_from(FULL)
by_method = pytest.mark.parametrize("method", METHODS)


def bound(method, dtype, m, condition):
    """To first order A + E changes A^(-1/2) by at most ½‖E‖/λ_min·‖A^(-1/2)‖ up to log m.

    "eigh" errs by E = m·eps·‖A‖ of float64 and rounds the result; the coupled iteration adds
    δ = 32 eps·‖A‖_F on purpose and rounds a few m·eps·‖A‖ in its products.
    """
    if method == "eigh":
        return 2 * m * eps(F64) * condition + math.sqrt(m) * eps(dtype)
    work = work_dtype(dtype)
    return (16 * math.sqrt(m) + 4 * m) * eps(work) * condition + math.sqrt(m) * eps(dtype)


@by_method
@pytest.mark.parametrize("log_cond", [0, 3, 6])
def test_against_sixty_digits(method, log_cond):
    a = with_eigenvalues(geometric(4, log_cond), seed=7)
    with mpmath.workdps(60):
        values, vectors = mpmath.eigsy(mpmath.matrix(a.tolist()))
        root = vectors * mpmath.diag([1 / mpmath.sqrt(v) for v in values]) * vectors.T
        expected = torch.tensor(root.tolist(), dtype=F64)
    error = operator_norms(inverse_sqrt(a, method) - expected) / operator_norms(expected)
    assert error <= bound(method, F64, 4, 10.0**log_cond)


@by_method
@settings(max_examples=30)
@given(m=sizes, dtype=full, k=st.integers(-40, 40), seed=seeds)
def test_powers_of_four_come_out_exactly(method, m, dtype, k, seed):
    a = gram(normal(m, m + 2, seed=seed, dtype=dtype)) + torch.eye(m, dtype=dtype)
    a = torch.where(a.abs() < 1e-3, 0.0, a)
    assert torch.equal(inverse_sqrt(times_power_of_two(a, 2 * k), method) * 2.0**k,
                       inverse_sqrt(a, method))  # fmt: skip


@settings(max_examples=40)
@given(m=sizes, dtype=st.sampled_from(FULL), data=st.data(), seed=seeds)
def test_a_deficient_matrix_gives_the_pseudo_inverse_root(m, dtype, data, seed):
    rank = data.draw(st.integers(0, m))
    values = geometric(m, 2.0, rank)
    a = with_eigenvalues(values, seed).to(dtype)
    q = orthogonal(m, m, seed)
    inverse = torch.where(values > 0, values, math.inf).rsqrt()
    expected = (q * inverse) @ q.mT
    # ‖A^(-1/2)‖ ≤ 10 and eigenvectors turn by eps·‖A‖/gap, gap ≥ 1e-2, when A is rounded.
    tolerance = 10 * (m * eps(dtype) / 1e-2 + eps(dtype))
    assert operator_norms(inverse_sqrt(a) - expected) <= tolerance


@by_method
@pytest.mark.parametrize("dtype", FULL)
def test_zero_gives_zero_within_a_stack(method, dtype):
    a = torch.stack([torch.zeros(3, 3), torch.eye(3)]).to(dtype)
    found, convergence = inverse_sqrt(a, method, report=True)
    assert torch.equal(found[0], torch.zeros(3, 3, dtype=dtype))
    # The floor 32·√3·eps on a unit eigenvalue costs half of it.
    assert operator_norms(found[1] - a[1]) <= 32 * eps(dtype)
    assert convergence.converged.all()


def test_rank_tolerance_cuts_relative_to_the_largest_eigenvalue():
    a = 1e5 * torch.diag(torch.tensor([1, 1e-3, 1e-6, 1e-9], dtype=F64))
    for tolerance, rank in ((0.0, 4), (1e-8, 3), (1e-5, 2), (0.5, 1)):
        root = inverse_sqrt(a, rank_tolerance=tolerance)
        assert torch.linalg.matrix_rank(root, atol=1e-9) == rank
    # By default rounding is cut, and nothing else.
    noisy = torch.diag(torch.tensor([1, 0.5 * 4 * eps(F64), 0, 2 * 4 * eps(F64)], dtype=F64))
    assert torch.linalg.matrix_rank(inverse_sqrt(noisy), atol=1e-9) == 2


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_low_precision_matrix_is_cut_at_its_own_rounding(dtype):
    noisy = torch.diag(torch.tensor([1.0, eps(dtype)])).to(dtype)
    assert inverse_sqrt(noisy)[1, 1] == 0
    signal = torch.diag(torch.tensor([1.0, 4 * eps(dtype)])).to(dtype)
    assert inverse_sqrt(signal)[1, 1].item() == pytest.approx(
        (4 * eps(dtype)) ** -0.5, rel=eps(dtype)
    )


@by_method
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_widened_before_anything_is_rounded(method, dtype):
    a = torch.diag(torch.tensor([60000.0, 8.0, 0.3])).to(dtype)
    found = inverse_sqrt(a, method, rank_tolerance=0.0)
    assert found.dtype == dtype
    expected = a.double().diagonal().rsqrt()
    floor_effect = 16 * eps(torch.float32) * 60000 / 0.3 if method == "newton-schulz" else 0.0
    torch.testing.assert_close(
        found.double().diagonal(), expected, rtol=eps(dtype) + floor_effect, atol=0
    )


@by_method
def test_a_stack_is_its_matrices(method):
    a = gram(normal(2, 3, 4, 6)) * torch.logspace(-200, 200, 6, dtype=F64).reshape(2, 3, 1, 1)
    found, convergence = inverse_sqrt(a, method, report=True)
    assert convergence.residual.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                found[i, j], inverse_sqrt(a[i, j], method), rtol=1e-10, atol=0
            )


@by_method
@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 4, 4), (2, 0, 3, 3)])
def test_empty(method, shape):
    found, convergence = inverse_sqrt(torch.zeros(shape), method, report=True)
    assert found.shape == shape
    assert convergence.residual.shape == shape[:-2]
    assert convergence.converged.all()


@by_method
@settings(max_examples=15)
@given(m=sizes, seed=seeds)
def test_orthogonal_equivariance_and_commutation(method, m, seed):
    a, q = with_eigenvalues(geometric(m, 3.0), seed), orthogonal(m, m, seed + 1)
    z = inverse_sqrt(a, method)
    turned = inverse_sqrt(symmetrized(q @ a @ q.mT), method)
    scale = operator_norms(z)
    condition = 1e3 if m > 1 else 1.0
    assert operator_norms(turned - q @ z @ q.mT) <= 2 * bound(method, F64, m, condition) * scale
    assert operator_norms(z - z.mT) <= bound(method, F64, m, condition) * scale
    assert operator_norms(z @ a - a @ z) <= bound(method, F64, m, condition) * scale


def test_report_tells_arrived_from_out_of_steps():
    a = with_eigenvalues(geometric(6, 4.0), seed=1)
    for method in METHODS:
        z, convergence = inverse_sqrt(a, method, report=True)
        assert convergence.converged
        assert convergence.residual.dtype == F64
        defect = operator_norms(z @ a @ z - torch.eye(6, dtype=F64))
        # Frobenius over √6 lies between the operator norm over √6 and the operator norm.
        assert defect / math.sqrt(6) * 0.99 - 1e-12 <= convergence.residual <= defect + 1e-12
    assert convergence.steps == coupled_steps(F64)
    for steps in (1, 3, 8):
        few = inverse_sqrt(a, "newton-schulz", steps=steps, report=True)[1]
        assert few.steps == steps
        assert not few.converged
        assert few.residual > 0.01


def test_residual_ignores_the_null_space():
    a = with_eigenvalues(geometric(6, 1.0, 3), seed=1)
    assert inverse_sqrt(a, report=True)[1].converged


@pytest.mark.parametrize("dtype", FULL)
def test_default_steps_carry_the_floor_to_one_and_no_fewer_would(dtype):
    steps, x = coupled_steps(dtype), math.sqrt(floor(dtype))
    for i in range(steps):
        assert 1 - x > eps(dtype), f"{i} steps would do"
        x = 1.5 * x - 0.5 * x**3
    assert 1 - x <= eps(dtype)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_coupled_recursion_is_the_scalar_one_on_each_eigenvalue(dtype, steps):
    """From y = λ/‖A‖_F + floor, z = 1: t = (3 − zy)/2, y ← yt, z ← tz."""
    values = geometric(5, 2.0)
    a = with_eigenvalues(values, seed=2)
    norm = values.square().sum().sqrt()
    y, z = values / norm + floor(dtype), torch.ones(5, dtype=F64)
    for _ in range(steps):
        t = 1.5 - 0.5 * z * y
        y, z = y * t, z * t
    q = orthogonal(5, 5, seed=2)
    expected = (q * (z / norm.sqrt())) @ q.mT
    found = coupled_inverse_sqrt(a.to(dtype), steps)
    # A step triples an error at most and adds a few units of each of its products.
    tolerance = 20 * 3.0**steps * eps(dtype)
    assert operator_norms(found - expected) <= tolerance * operator_norms(expected)


def test_the_unchecked_iteration_never_looks_at_values():
    with FakeTensorMode() as mode:  # refuses every data-dependent value
        a = mode.from_tensor(gram(normal(2, 4, 5)))
        assert coupled_inverse_sqrt(a, 4).shape == (2, 4, 4)


def test_input_is_not_changed():
    a = gram(normal(4, 5))
    copy = a.clone()
    for method in METHODS:
        inverse_sqrt(a, method, report=True)
    assert torch.equal(a, copy)


@pytest.mark.parametrize("dtype", FULL)
def test_rounding_is_forgiven_and_a_negative_eigenvalue_is_not(dtype):
    m = 5
    slightly = with_eigenvalues(torch.tensor([1, 0.5, 0.1, 0, -m * eps(dtype)], dtype=F64))
    assert (psd_eigh(slightly)[0] >= 0).all()
    for method in METHODS:
        assert torch.isfinite(inverse_sqrt(slightly.to(dtype), method)).all()
    clearly = with_eigenvalues(torch.tensor([1, 0.5, 0.1, 0, -0.01], dtype=F64)).to(dtype)
    for method in METHODS:
        with pytest.raises(ValueError, match=r"positive semidefinite, .* -0\.01; .* L @ L\.mT"):
            inverse_sqrt(clearly, method)
    with pytest.raises(ValueError, match="positive semidefinite"):
        inverse_sqrt(torch.stack([torch.eye(m, dtype=dtype), clearly]))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([[1.0]],), {}, TypeError, "a must be a torch.Tensor"),
        ((torch.eye(2).int(),), {}, TypeError, "a must hold floating-point"),
        ((torch.eye(2).cdouble(),), {}, TypeError, "a must be real"),
        ((torch.eye(2).to_sparse(),), {}, TypeError, "a must be dense"),
        ((torch.ones(2),), {}, ValueError, "a must have at least two dimensions"),
        ((torch.ones(2, 3),), {}, ValueError, "a must be square"),
        ((torch.tensor([[1.0, 0.5], [0.0, 1.0]]),), {}, ValueError, "a must be symmetric"),
        ((torch.full((2, 2), math.nan),), {}, ValueError, "a must be finite"),
        ((torch.full((2, 2), math.inf),), {}, ValueError, "a must be finite"),
        ((torch.eye(2), "svd"), {}, ValueError, "method must be one of 'eigh', 'newton-schulz'"),
        ((torch.eye(2), "newton-schulz"), {"steps": -1}, ValueError, "steps must be an integer"),
        ((torch.eye(2), "newton-schulz"), {"steps": 2.0}, TypeError, "steps must be an integer"),
        ((torch.eye(2),), {"steps": 5}, ValueError, "steps"),
        ((torch.eye(2),), {"rank_tolerance": -0.1}, ValueError, "rank_tolerance must lie in"),
        ((torch.eye(2),), {"rank_tolerance": 1.0}, ValueError, "rank_tolerance must lie in"),
    ],
)
def test_bad_input(arguments, options, error, words):
    with pytest.raises(error, match=words):
        inverse_sqrt(*arguments, **options)
