"""(SSᵀ + Λ)^(-1/2) S against 60-digit arithmetic, closed cases, and where rounding is hardest.

`test_every_method.py` has what every method promises of every input.
"""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_half import clusters
from nucleon import moments
from nucleon.linalg import augmented_polar, polar, residual
from nucleon.linalg.augmented import (
    METHODS,
    augmented_bfloat16,
    augmented_coupled,
    augmented_polynomial,
    augmented_svd,
)
from nucleon.linalg.coefficients import newton_schulz
from nucleon.linalg.kernels import lifted
from nucleon.optim.polar_methods import polynomials
from strategies import (
    F64,
    FULL,
    ITERATIVE,
    REFERENCE,
    at_scale,
    eps,
    geometric,
    gram,
    normal,
    operator_norms,
    orthogonal,
    seeds,
    shapes,
    smallest,
    times_power_of_two,
    whole_range,
    with_eigenvalues,
    with_singular_values,
)

few = settings(max_examples=settings.default.max_examples // 5)
by_method = pytest.mark.parametrize("method", METHODS)


def promise(method, dtype):
    return (REFERENCE if method == "eigh" else ITERATIVE)[dtype]


def oracle(s, smoothing):
    """The leading block of the polar factor of [S L], and the singular values of [S L]."""
    values, vectors = np.linalg.eigh(smoothing.double().numpy())
    root = vectors * np.sqrt(values.clip(0))
    u, sigma, vt = np.linalg.svd(np.hstack([s.double().numpy(), root]), full_matrices=False)
    return torch.from_numpy(u @ vt[:, : s.shape[-1]]), sigma


def sixty_digits(s, smoothing):
    with mpmath.workdps(60):
        x, rest = mpmath.matrix(s.tolist()), mpmath.matrix(smoothing.tolist())
        values, vectors = mpmath.eigsy(x * x.T + rest)
        root = vectors * mpmath.diag([1 / mpmath.sqrt(v) for v in values]) * vectors.T
        return torch.tensor((root * x).tolist(), dtype=F64).reshape(s.shape)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("log_cond", [0, 2, 4, 6])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 3), (3, 5), (4, 2)])
def test_the_reference_against_sixty_digits(dtype, log_cond, shape):
    """Condition numbers of SSᵀ + Λ up to 1e12, through the Gram matrix and through the SVD."""
    m = shape[0]
    s = with_singular_values(shape, geometric(min(shape), log_cond), seed=3).to(dtype)
    for factor in (1e-1, 10.0**-log_cond):
        smoothing = with_eigenvalues(factor**2 * geometric(m, 1.0), seed=5).to(dtype)
        sigma, rest = oracle(s, smoothing)[1], torch.linalg.matrix_norm(smoothing.double()).item()
        # The rounding of Λ's root, of the size of Λ/σ_min, and that of an SVD, both in float64.
        backward = sigma[0] / sigma[-1] + rest / sigma[-1] ** 2
        bound = REFERENCE[dtype] + 10 * m * eps(F64) * backward
        assert operator_norms(augmented_polar(s, smoothing) - sixty_digits(s, smoothing)) <= bound


def test_an_ill_conditioned_matrix_without_smoothing_keeps_half_its_digits():
    """κ = 1e24: eps·√κ = 2e-4 by the SVD, nothing at all by the Gram matrix."""
    u, v = orthogonal(5, 5, 1), orthogonal(8, 5, 2)
    s = (u * geometric(5, 12.0)) @ v.mT
    result = augmented_polar(s, torch.zeros(5, 5, dtype=F64))
    assert operator_norms(result - u @ v.mT) <= 10 * 5 * eps(F64) * 1e12


# --- feasibility ---------------------------------------------------------------------------------


@by_method
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("units", [1, 8, 32, 44])
@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-8])
def test_feasible_where_rounding_made_the_smoothing_indefinite(method, dtype, units, size):
    """An eigenvalue of −units·eps is taken for rounding (32·‖Λ‖_F = 45 units are): a long sum of
    float32 Gram matrices has them. S sees that direction, or is orthogonal to it."""
    m = 5
    values = torch.tensor([1, 1, 0, 0, -units * eps(dtype)], dtype=F64)
    smoothing = with_eigenvalues(values, seed=1).to(dtype)
    blind = orthogonal(m, m, seed=1)[:, :-1] @ normal(m - 1, 7)
    for s in (normal(m, 7), blind, torch.zeros(m, 7, dtype=F64)):
        result = augmented_polar((size * s).to(dtype), smoothing, method)
        assert torch.isfinite(result).all()
        assert operator_norms(result) <= 1 + promise(method, dtype)


# --- limits and closed cases ---------------------------------------------------------------------


def test_restarts_keep_float32_accurate():
    """Without them the floor of B hides small singular values, as the docstring says."""
    s = with_singular_values((24, 40), geometric(24, 3.4)).float()
    zero, cubic = torch.zeros(24, 24), (newton_schulz(),) * 26
    exact = augmented_polar(s, zero)
    for method in ("newton-schulz", "polar-express"):
        assert operator_norms(augmented_polar(s, zero, method) - exact) <= 1e-4
    lost = augmented_polynomial(s, zero, cubic, restarts=())
    assert operator_norms(lost) <= 1 + 1e-3
    assert operator_norms(lost - exact) >= 0.2


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express", "coupled"])
def test_iterations_have_derivatives_in_both_arguments(method):
    s, root = normal(3, 4), normal(3, 3)
    s.requires_grad_()
    root.requires_grad_()

    def run(s, root):
        return augmented_polar(s, root @ root.mT + torch.eye(3, dtype=F64), method, steps=12)

    assert torch.autograd.gradcheck(run, (s, root))


# --- steps and residuals --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express"])
def test_singular_values_down_to_the_rank_tolerance_arrive(method):
    """The least beside 23 of the largest, where ‖S‖_F is nearly √m of them; and no more steps."""
    sigma = torch.ones(24, dtype=F64)
    sigma[-1] = 1e-3
    s, zero = with_singular_values((24, 30), sigma), torch.zeros(24, 24, dtype=F64)
    arrived = augmented_polar(s, zero, method, rank_tolerance=0.999e-3)
    assert residual(arrived, s, zero) <= 1e-8  # the floor of 32 eps·‖Λ‖_F is 0, 4 eps/σ² is 1e-9
    short = augmented_polar(s, zero, method, rank_tolerance=1e-2)
    assert residual(short, s, zero) > 1e-2


@settings(max_examples=30)
@given(shape=shapes, smoothed=st.booleans(), log_cond=st.floats(0, 6), seed=seeds)
def test_the_residual_is_the_distance_to_the_exact_factor(shape, smoothed, log_cond, seed):
    """Against NumPy, of any P at all, with the directions that count at full rank."""
    s = with_singular_values(shape, geometric(min(shape), log_cond), seed)
    smoothing = gram(normal(shape[0], shape[0] + 2, seed=seed)) if smoothed else None
    p = normal(*shape, seed=seed + 1)
    if smoothed:
        exact, _ = oracle(s, smoothing)
    else:
        u, _, vh = np.linalg.svd(s.numpy(), full_matrices=False)
        exact, p = torch.from_numpy(u @ vh), torch.from_numpy(u @ u.T) @ p
    expected = operator_norms(p - exact)
    torch.testing.assert_close(residual(p, s, smoothing), expected, rtol=1e-9, atol=1e-9)


def test_the_residual_sees_directions_that_did_not_arrive_and_no_noise():
    s = with_singular_values((6, 8), torch.tensor([1, 1, 1, 1, 1, 1e-3], dtype=F64))
    few, enough = polar(s, "newton-schulz", steps=6), polar(s, "newton-schulz")
    assert residual(few, s) > 0.05
    assert residual(enough, s) < 1e-6
    assert residual(few, s, rank_tolerance=0.1) < residual(few, s) / 2
    for shape, rank in (((16, 32), 3), ((64, 64), 8), ((9, 4), 2)):
        noisy = (normal(shape[0], rank) @ normal(rank, shape[1])).float()
        zero = torch.zeros(shape[0], shape[0])
        for method in ("newton-schulz", "polar-express"):
            assert residual(polar(noisy, method), noisy) < 1e-3
            assert residual(augmented_polar(noisy, zero, method), noisy, zero) < 1e-3
    stack = torch.zeros(2, 0, 3, 5)
    assert residual(stack, stack).shape == (2, 0)
    assert residual(torch.zeros(3, 5), torch.zeros(3, 5), torch.eye(3)) == 0
    with pytest.raises(ValueError, match=r"p must have the shape \(6, 8\) of s, got \(8, 6\)"):
        residual(enough.mT, s)


# --- rounding of the smallest numbers, and of sums ------------------------------------------------


@by_method
@pytest.mark.parametrize("dtype", FULL)
def test_a_subnormal_smoothing_still_smooths(method, dtype):
    """Beside an S far below √Λ the factor is Λ^(-1/2) S, not the polar factor of S.

    Λ = q·I of a few smallest numbers, with nothing to lift, is exact; a dense one of q = 2^10·m of
    them is off by the lift of 32m at most, so the factor by a relative 2^-6 and the rounding of Λ.
    """
    m, q = 4, 2.0**12
    s = at_scale(normal(m, 6), round(math.log2(smallest(dtype)) / 2) - 40, dtype)
    expected = s.double() / math.sqrt(3 * smallest(dtype))
    result = augmented_polar(s, 3 * smallest(dtype) * torch.eye(m, dtype=dtype), method)
    torch.testing.assert_close(result.double(), expected, rtol=100 * eps(dtype), atol=0)
    dense = with_eigenvalues(torch.tensor([1, 1, 0.5, 0.5], dtype=F64))
    smoothing = (dense * q * m * smallest(dtype)).to(dtype)
    values, vectors = np.linalg.eigh(smoothing.double().numpy() / smallest(dtype))
    root = vectors / np.sqrt(values) @ vectors.T / math.sqrt(smallest(dtype))
    exact = torch.from_numpy(root @ s.double().numpy())
    error = operator_norms(augmented_polar(s, smoothing, method) - exact)
    assert error <= 2.0**-6 * operator_norms(exact)


def nearly_rank_one(m, n, small):
    """Rows of ones beside singular values of `small` times the largest: equal terms in all sums."""
    columns = normal(n, m, seed=1)
    columns[:, 0] = 1
    rows = normal(m, m, seed=2)
    rows[:, 0] = 1
    values = torch.full((m,), small, dtype=F64)
    values[0] = 1
    return ((torch.linalg.qr(rows).Q * values) @ torch.linalg.qr(columns).Q.mT).float()


HARD = {
    "6 rows of 64×64": lambda: clusters(64, 64, 19, rows=6)[0],
    "6 rows of 64×128": lambda: clusters(64, 128, 19, rows=6)[0],
    "6 rows of 128×128": lambda: clusters(128, 128, 19, rows=6)[0],
    "2×1024": lambda: nearly_rank_one(2, 1024, 4e-3),
    "4×16384": lambda: nearly_rank_one(4, 16384, 4e-3),
    "2×65536": lambda: nearly_rank_one(2, 65536, 4e-3),
    "2×65536, transposed": lambda: nearly_rank_one(2, 65536, 4e-3).mT.contiguous().mT,
}
"""Rounding moves the eigenvalues of a float32 Gram matrix by 1e-7 of its norm, and by more in sums
of many equal terms; here the squares of singular values are 1e-5 of it."""


@pytest.mark.parametrize("method", ["polar-express", "coupled"])
@pytest.mark.parametrize("name", HARD)
def test_the_rounding_of_a_gram_matrix_stays_in_the_ball(name, method):
    """With the optimizers' own steps, without Λ, beside little of it and beside a singular one."""
    s = HARD[name]()
    m = len(s)
    gram, size = s @ s.mT, s.norm() ** 2
    direction = normal(m, 1, seed=3).float()
    line = direction @ direction.mT / direction.norm() ** 2
    shares = (1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
    kinds = [share * a for share in shares for a in (gram, size * line, size / m * torch.eye(m))]
    smoothing = torch.stack([torch.zeros(m, m), *kinds])
    stack = s.expand(len(smoothing), -1, -1)
    if method == "coupled":
        result = augmented_coupled(stack, smoothing, 15)
    else:
        result = augmented_polynomial(
            stack, smoothing, polynomials("polar-express", 5), restarts=()
        )
    assert torch.isfinite(result).all()
    assert operator_norms(result).max() <= 1 + 1e-3


def by_bfloat16(s, smoothing):
    return augmented_bfloat16(s, smoothing, polynomials("bfloat16", 5))


@pytest.mark.parametrize("dtype", FULL)
def test_bfloat16_with_rows_whose_squares_are_no_numbers(dtype):
    """Parallel rows, one so small that the rounding of its square is as large as the square."""
    row = normal(1, 7, seed=3)
    for power in range(math.frexp(smallest(dtype))[1] // 2 - 2, 0):
        s = torch.cat([times_power_of_two(row, power), row]).to(dtype)
        result = by_bfloat16(s, torch.zeros(2, 2, dtype=dtype))
        assert operator_norms(result - s / operator_norms(s)) <= 0.1


def test_bfloat16_with_columns_whose_sum_rounds_more_than_the_rows_allow():
    for seed in range(40):
        s = normal(2, 1, seed=seed).float() @ normal(1, 100_000, seed=seed + 1).abs().float()
        result = by_bfloat16(s, torch.zeros(2, 2))
        assert operator_norms(result - s / operator_norms(s)) <= 0.1


@pytest.mark.parametrize("m", [2, 3, 6])
def test_bfloat16_factors_the_sums_that_rounding_made_indefinite(m):
    """M̂ of the same gradient for ever, as small a discount as `floor` has room for."""
    gradients = (normal(200, m, 1, seed=m) @ normal(200, 1, 9, seed=m + 1)).float()
    smoothing = torch.zeros(200, m, m)
    for _ in range(400):
        smoothing = moments.accumulate_gram(smoothing, gradients, 0.984**0.5)
    s = gradients * 8  # as large as √‖M̂‖: singular values of 1/√2
    result = by_bfloat16(s, smoothing)
    exact = augmented_svd(s.double(), smoothing.double(), 1e-3)
    assert operator_norms(result - exact).max() <= 0.1


# --- the lift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FULL)
@few
@given(data=st.data(), seed=seeds)
def test_nothing_is_lifted_that_need_not_be(dtype, data, seed):
    m = data.draw(st.sampled_from([1, 2, 5, 17]))
    diagonal = at_scale(normal(m, 1, seed=seed).abs(), data.draw(whole_range(dtype)), dtype)
    assert torch.equal(lifted(torch.diag(diagonal[:, 0])), torch.diag(diagonal[:, 0]))
    zero = torch.zeros(2, m, m, dtype=dtype)
    assert torch.equal(lifted(zero), zero)
    # Normal numbers whose last bit is above 64m of the smallest ones do not notice.
    normal_power = math.log2(torch.finfo(dtype).tiny) + math.log2(128 * m) + 10
    power = data.draw(st.integers(math.ceil(normal_power), 100))
    dense = at_scale(normal(m, m, seed=seed) + 10, power, dtype)
    assert torch.equal(lifted((dense + dense.mT) / 2), (dense + dense.mT) / 2)
