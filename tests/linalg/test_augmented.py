"""(SSᵀ + Λ)^(-1/2) S against the SVD of [S L] by NumPy, 60-digit arithmetic and closed cases."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nucleon.linalg import augmented_polar
from nucleon.linalg.augmented import METHODS, augmented_coupled, augmented_polynomial
from nucleon.linalg.coefficients import newton_schulz
from nucleon.linalg.roots import coupled_steps, floor
from strategies import (
    EMPTY,
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
    shapes,
    symmetrized,
    times_power_of_two,
    with_eigenvalues,
    with_singular_values,
)

ITERATIVE = METHODS[1:]
by_method = pytest.mark.parametrize("method", METHODS)
by_iteration = pytest.mark.parametrize("method", ITERATIVE)

# What is promised of ‖P‖_op over the whole contract: the reference, then the iterations.
PROMISE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
ITERATIVE_PROMISE = PROMISE | {torch.float64: 1e-3, torch.float32: 1e-3}


def promise(method, dtype):
    return (PROMISE if method == "eigh" else ITERATIVE_PROMISE)[dtype]


def oracle(s, smoothing):
    """The leading block of the polar factor of [S L], and the singular values of [S L]."""
    values, vectors = np.linalg.eigh(smoothing.double().numpy())
    root = vectors * np.sqrt(values.clip(0))
    u, sigma, vt = np.linalg.svd(np.hstack([s.double().numpy(), root]), full_matrices=False)
    return torch.from_numpy(u @ vt[:, : s.shape[-1]]), sigma


def error_bound(method, s, smoothing, sigma):
    """First-order error of each method, with κ = (σ_max/σ_min)² the condition of SSᵀ + Λ.

    A change E of SSᵀ + Λ turns the result by ‖E‖/(2λ_min), a change F of [S L] by ‖F‖/σ_min.
    - "eigh": within the promise where the Gram matrix serves; else E is the rounding of Λ's root,
      F that of an SVD, both in float64.
    - the others add a floor to Λ, 32 eps‖Λ‖_F, or to SSᵀ + Λ, 32 eps‖SSᵀ + Λ‖_F, and round their
      Gram products by (m + n)·eps·‖SSᵀ + Λ‖; a hundred roundings more do not meet κ.
    """
    m, n = s.shape
    root_condition, rest = sigma[0] / sigma[-1], torch.linalg.matrix_norm(smoothing.double()).item()
    if method == "eigh":
        backward = root_condition + rest / sigma[-1] ** 2
        return PROMISE[s.dtype] + 10 * m * eps(F64) * backward
    floor = 16 * math.sqrt(m) if method == "coupled" else 16 * rest / sigma[0] ** 2
    return eps(s.dtype) * ((floor + m + n) * root_condition**2 + 100)


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
        _, sigma = oracle(s, smoothing)
        bound = error_bound("eigh", s, smoothing, sigma)
        assert operator_norms(augmented_polar(s, smoothing) - sixty_digits(s, smoothing)) <= bound


def test_an_ill_conditioned_matrix_without_smoothing_keeps_half_its_digits():
    """κ = 1e24: eps·√κ = 2e-4 by the SVD, nothing at all by the Gram matrix."""
    u, v = orthogonal(5, 5, 1), orthogonal(8, 5, 2)
    s = (u * geometric(5, 12.0)) @ v.mT
    found = augmented_polar(s, torch.zeros(5, 5, dtype=F64))
    assert operator_norms(found - u @ v.mT) <= 10 * 5 * eps(F64) * 1e12


# --- feasibility ---------------------------------------------------------------------------------


@by_iteration
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("dtype", FULL)
def test_feasible_when_steps_run_out(method, steps, dtype):
    roots = [torch.zeros(12), 1e-3 * torch.ones(12), geometric(12, 4.0), geometric(12, 2.0, 6)]
    sigmas = [torch.ones(12), geometric(12, 3.0), geometric(12, 12.0), geometric(12, 1.0, 5)]
    for i, root in enumerate(roots):
        for j, sigma in enumerate(sigmas):
            s = with_singular_values((12, 15), sigma, seed=i).to(dtype)
            smoothing = gram((orthogonal(12, 12, seed=j) * root).to(dtype))
            found = augmented_polar(s, smoothing, method, steps=steps)
            assert operator_norms(found) <= 1 + promise(method, dtype)


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
        found = augmented_polar((size * s).to(dtype), smoothing, method)
        assert torch.isfinite(found).all()
        assert operator_norms(found) <= 1 + promise(method, dtype)


@by_method
def test_an_indefinite_smoothing_is_refused(method):
    clearly = with_eigenvalues(torch.tensor([1, 0.5, 0.2, -0.05], dtype=F64))
    assert (clearly.diagonal() > 0).all()
    for dtype in FULL:
        with pytest.raises(ValueError, match="positive semidefinite"):
            augmented_polar(normal(4, 6, dtype=dtype), clearly.to(dtype), method)


@pytest.mark.parametrize("dtype", HALF)
def test_the_smoothing_of_a_half_matrix_is_judged_by_its_own_precision(dtype):
    """Λ is float32, so −0.05 in 32 dimensions is no rounding, though 8m·eps of bfloat16 is 2."""
    values = torch.ones(32, dtype=F64)
    values[-1] = -0.05
    smoothing = with_eigenvalues(values).float()
    with pytest.raises(ValueError, match="positive semidefinite"):
        augmented_polar(1e-3 * torch.ones(32, 4, dtype=dtype), smoothing)


# --- limits and closed cases ---------------------------------------------------------------------


@by_method
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 4), (3, 6), (5, 2)])
def test_without_smoothing_it_is_the_polar_factor(method, shape):
    s = with_singular_values(shape, geometric(min(shape), 2.0), seed=4)
    u, sigma, vh = torch.linalg.svd(s, full_matrices=False)
    found = augmented_polar(s, torch.zeros(shape[0], shape[0], dtype=F64), method)
    bound = error_bound(method, s, torch.zeros(1, 1), sigma.numpy())
    if shape[0] > shape[1]:
        # Deficient: the rounding of S outside its range, eps·‖S‖, meets at most eps^(-½) in the
        # recursion and (32 eps)^(-½) in the coupled root.
        bound += 0 if method == "eigh" else 100 * math.sqrt(eps(F64))
    assert operator_norms(found - u @ vh) <= bound


@by_method
@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (2, 5)])
def test_small_smoothing_tends_to_the_polar_factor(method, shape):
    """‖aug(S, cΛ) − polar(S)‖ ≤ c‖Λ‖/(2σ_min²), and it does move by about that."""
    s, smoothing = normal(*shape, seed=2), gram(normal(shape[0], shape[0] + 1, seed=3))
    sigma = torch.linalg.svdvals(s)
    for c in (1e-2, 1e-4, 1e-6):
        u, _, vh = torch.linalg.svd(s, full_matrices=False)
        distance = operator_norms(augmented_polar(s, c * smoothing, method) - u @ vh).item()
        slope = c * operator_norms(smoothing).item() / (2 * sigma[-1].item() ** 2)
        noise = error_bound(method, s, c * smoothing, sigma.numpy())
        assert distance <= slope + noise
        least = c * torch.linalg.eigvalsh(smoothing)[0].item() / (2 * sigma[0].item() ** 2)
        assert distance >= 0.5 * least - noise


@by_method
@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (2, 5), (5, 2)])
def test_large_smoothing_tends_to_unconstrained_ftrl(method, shape):
    """√c·aug(S, cΛ) = (Λ + SSᵀ/c)^(-1/2) S → Λ^(-1/2) S at the rate 1/c."""
    s, smoothing = normal(*shape, seed=2), gram(normal(shape[0], shape[0] + 3, seed=3))
    values, vectors = torch.linalg.eigh(smoothing)
    limit = (vectors * values.rsqrt()) @ vectors.mT @ s
    for c in (1e4, 1e8, 1e12):
        found = math.sqrt(c) * augmented_polar(s, c * smoothing, method)
        change = operator_norms(s).item() ** 2 / c / (2 * values[0].item())
        # "eigh" promises 1e-9 relative to the ball, which the factor √c magnifies; its error here
        # is that of a well-conditioned Gram matrix.
        condition = (values[-1] / values[0]).item()
        rounding = 100 * shape[0] * eps(F64) * condition
        assert operator_norms(found - limit) <= (change + rounding) * operator_norms(limit)


@by_method
@settings(max_examples=25)
@given(shape=shapes, log_epsilon=st.floats(-3, 3), seed=seeds)
def test_a_ridge_is_soft_muon(method, shape, log_epsilon, seed):
    """aug(S, ε²I) = U diag(σ/√(σ²+ε²)) Vᵀ."""
    epsilon, sigma = 10.0**log_epsilon, geometric(min(shape), 3.0)
    u, v = orthogonal(shape[0], len(sigma), seed), orthogonal(shape[1], len(sigma), seed + 1)
    s, smoothing = (u * sigma) @ v.mT, epsilon**2 * torch.eye(shape[0], dtype=F64)
    expected = (u * (sigma / torch.hypot(sigma, torch.tensor(epsilon, dtype=F64)))) @ v.mT
    found = augmented_polar(s, smoothing, method)
    bound = error_bound(method, s, smoothing, oracle(s, smoothing)[1])
    assert operator_norms(found - expected) <= bound


@by_method
@pytest.mark.parametrize("shape", [(4, 4), (4, 6), (6, 4)])
def test_diagonal_matrices_are_coordinatewise(method, shape):
    """sᵢ/√(sᵢ² + λᵢ), signs included: FAML on the ℓ∞ ball."""
    k = min(shape)
    values = torch.tensor([3.0, -0.2, 1.0, -5.0], dtype=F64)
    rest = torch.linspace(0.1, 2.0, shape[0], dtype=F64)
    s = torch.zeros(shape, dtype=F64)
    s[range(k), range(k)] = values
    found = augmented_polar(s, torch.diag(rest), method)
    expected = torch.zeros(shape, dtype=F64)
    expected[range(k), range(k)] = values / (values.square() + rest[:k]).sqrt()
    bound = error_bound(method, s, torch.diag(rest), oracle(s, torch.diag(rest))[1])
    assert operator_norms(found - expected) <= bound


@by_method
def test_it_is_the_inverse_root_times_s(method):
    s, smoothing = normal(4, 7), gram(normal(4, 5, seed=1))
    values, vectors = np.linalg.eigh((s @ s.mT + smoothing).numpy())
    root = torch.from_numpy((vectors / np.sqrt(values)) @ vectors.T)
    expected = root @ s
    torch.testing.assert_close(augmented_polar(s, smoothing, method), expected, rtol=0, atol=1e-11)
    # And Λ acts on the rows, not anywhere else: X Xᵀ + Y Yᵀ = I with Y = (SSᵀ+Λ)^(-1/2) L.
    x = augmented_polar(s, smoothing, method)
    complete = x @ x.mT + root @ smoothing @ root
    torch.testing.assert_close(complete, torch.eye(4, dtype=F64), rtol=0, atol=1e-11)


# --- invariances ---------------------------------------------------------------------------------


@by_method
@settings(max_examples=20)
@given(shape=shapes, seed=seeds)
def test_orthogonal_equivariance(method, shape, seed):
    """aug(QSR, QΛQᵀ) = Q aug(S, Λ) R, aug(−S, Λ) = −aug(S, Λ)."""
    m, n = shape
    s = with_singular_values(shape, geometric(min(shape), 2.0), seed)
    smoothing = with_eigenvalues(geometric(m, 3.0), seed + 2)
    q, r = orthogonal(m, m, seed + 3), orthogonal(n, n, seed + 4)
    bound = 2 * error_bound(method, s, smoothing, oracle(s, smoothing)[1])
    found = augmented_polar(s, smoothing, method)
    turned = augmented_polar(q @ s @ r, symmetrized(q @ smoothing @ q.mT), method)
    assert operator_norms(turned - q @ found @ r) <= bound
    assert operator_norms(augmented_polar(-s, smoothing, method) + found) <= bound


@by_method
@settings(max_examples=40)
@given(shape=shapes, dtype=st.sampled_from(FULL), tilt=st.integers(-20, 20), data=st.data())
def test_powers_of_two_change_no_bit(method, shape, dtype, tilt, data):
    """aug(2^k S, 4^k Λ) = aug(S, Λ), for every k that both can hold."""
    s = normal(*shape, seed=data.draw(seeds), dtype=dtype)
    s = torch.where(s.abs() < 0.01, 0.5, s)
    smoothing = gram(normal(shape[0], 2, dtype=dtype))
    smoothing = torch.where(smoothing.abs() < 0.01, 0.0, smoothing) + torch.eye(shape[0]).to(dtype)
    smoothing = times_power_of_two(smoothing, tilt)
    info = torch.finfo(dtype)
    low = (math.ceil(math.log2(info.tiny)) + 30) // 2
    k = data.draw(st.integers(low, (math.floor(math.log2(info.max)) - 30) // 2))
    scaled = augmented_polar(times_power_of_two(s, k), times_power_of_two(smoothing, 2 * k), method)
    assert torch.equal(scaled, augmented_polar(s, smoothing, method))


@by_method
@pytest.mark.parametrize("dtype", FULL)
def test_the_ends_of_the_range(method, dtype):
    info = torch.finfo(dtype)
    largest, tiny, subnormal = info.max, info.tiny, info.tiny * info.eps
    for value in (largest, tiny, subnormal):
        s = torch.tensor([[value, 0.0, 0.0], [0.0, -value, 0.0]], dtype=dtype)
        found = augmented_polar(s, torch.zeros(2, 2, dtype=dtype), method)
        expected = torch.tensor([[1.0, 0, 0], [0, -1.0, 0]], dtype=dtype)
        assert operator_norms(found - expected) <= 100 * eps(dtype)
        # Whatever S is, the other end of the range beside it either dominates or vanishes.
        for other in (largest, tiny, subnormal):
            found = augmented_polar(s, other * torch.eye(2, dtype=dtype), method)
            exact = value / math.hypot(value / 2, math.sqrt(other) / 2) / 2
            assert operator_norms(found).item() == pytest.approx(exact, rel=100 * eps(dtype))


@by_method
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 6, 4), (2, 3, 1, 5), (2, 3, 5, 1)])
def test_a_stack_is_its_matrices(method, shape):
    scale = torch.logspace(-100, 100, 6, dtype=F64).reshape(2, 3, 1, 1)
    s, m = normal(*shape) * scale, shape[-2]
    smoothing = gram(normal(2, 3, m, m + 1, seed=1) * scale.flip(0))
    smoothing[0, 0], smoothing[1, 1] = 0, gram(normal(m, 1)) * scale[1, 1] ** 2
    if m <= shape[-1]:
        s[1, 2] = 0
    found, convergence = augmented_polar(s, smoothing, method, report=True)
    assert convergence.residual.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = augmented_polar(s[i, j], smoothing[i, j], method)
            # One ill-posed member sends a stack through the SVD, within the promise; and where
            # [S L] is deficient the rounding of S, eps·‖S‖, meets up to eps^(-½).
            deficient = m > shape[-1] and method != "eigh"
            noise = 100 * math.sqrt(eps(F64)) if deficient else 1e-9
            torch.testing.assert_close(found[i, j], alone, rtol=0, atol=noise)
    strided = augmented_polar(s.mT.contiguous().mT, smoothing.mT, method)
    torch.testing.assert_close(strided, found, rtol=0, atol=noise)


@by_method
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 1), (1, 3)])
def test_one_smoothing_serves_a_stack(method, batch):
    s = normal(2, 3, 4, 5) * torch.logspace(-3, 3, 6, dtype=F64).reshape(2, 3, 1, 1)
    smoothing = gram(normal(*batch, 4, 6, seed=1))
    found, convergence = augmented_polar(s, smoothing, method, report=True)
    expected = augmented_polar(s, smoothing.expand(2, 3, 4, 4), method)
    assert torch.equal(found, expected)
    assert convergence.residual.shape == (2, 3)


@by_method
@pytest.mark.parametrize("shape", EMPTY)
def test_empty(method, shape):
    smoothing = torch.eye(shape[-2]).expand(*shape[:-2], shape[-2], shape[-2])
    found, convergence = augmented_polar(torch.zeros(shape), smoothing, method, report=True)
    assert found.shape == shape
    assert convergence.residual.shape == shape[:-2]
    assert convergence.converged.all()


@by_method
@pytest.mark.parametrize("dtype", FULL + HALF)
def test_zero_gives_zero_within_a_stack(method, dtype):
    s = torch.stack([torch.zeros(3, 5), torch.eye(3, 5), torch.zeros(3, 5)]).to(dtype)
    smoothing = torch.stack([torch.zeros(3, 3), torch.zeros(3, 3), torch.eye(3)])
    smoothing = smoothing.to(F64 if dtype is F64 else torch.float32)
    found, convergence = augmented_polar(s, smoothing, method, report=True)
    assert not found[0].any()
    assert not found[2].any()
    # The floor of the coupled iteration, 32·√3·eps, costs half of it.
    assert operator_norms(found[1] - s[1]) <= 32 * eps(dtype)
    assert convergence.converged.all()


def test_rank_tolerance_cuts_the_reference():
    s = with_singular_values((4, 6), torch.tensor([1, 1e-2, 1e-4, 1e-6], dtype=F64))
    zero = torch.zeros(4, 4, dtype=F64)
    for tolerance, rank in ((0.0, 4), (1e-7, 4), (1e-5, 3), (1e-3, 2), (0.5, 1)):
        found = augmented_polar(s, zero, rank_tolerance=tolerance)
        assert torch.linalg.matrix_rank(found, atol=1e-6) == rank
    # The smoothing counts towards the rank of [S L]: nothing is cut once it fills the space.
    ridge = augmented_polar(s, 1e-2 * torch.eye(4, dtype=F64), rank_tolerance=1e-3)
    assert torch.linalg.matrix_rank(ridge, atol=1e-8) == 4


@pytest.mark.parametrize("dtype", FULL)
def test_rounding_noise_is_no_direction_of_its_own(dtype):
    """A tall or deficient S without smoothing: the rank of the factor is that of S."""
    for shape, rank in (((7, 2), 2), ((6, 6), 3), ((5, 9), 1)):
        s = with_singular_values(shape, geometric(min(shape), 1.0, rank), seed=rank).to(dtype)
        found = augmented_polar(s, torch.zeros(shape[0], shape[0], dtype=dtype))
        sigma = torch.linalg.svdvals(found.double())
        assert (sigma[:rank] - 1).abs().max() <= 1e-5
        assert (sigma[rank:] <= 1e-5).all()


# --- half precision ------------------------------------------------------------------------------


@by_method
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 4), (4, 4), (4, 7), (7, 4)])
def test_half_precision_is_float32_rounded_once(method, dtype, shape):
    s, smoothing = normal(*shape, dtype=dtype), gram(normal(shape[0], 9, seed=1)).float()
    found = augmented_polar(s, smoothing, method)
    assert found.dtype == dtype
    wide = augmented_polar(s.float(), smoothing, method)
    assert torch.equal(found, wide.to(dtype)) or method == "eigh"
    # "eigh" works in float64 for both: they differ where the first rounding tips the second.
    torch.testing.assert_close(found.float(), wide, rtol=eps(dtype) / 2 * 1.001, atol=1e-7)


@by_method
@pytest.mark.parametrize("dtype", HALF)
def test_a_converged_half_result_is_reported_so(method, dtype):
    """The last rounding, about eps/2, is the dtype's and not the iteration's."""
    s, smoothing = normal(6, 9, dtype=dtype), torch.eye(6)
    found, convergence = augmented_polar(s, smoothing, method, report=True)
    expected, _ = oracle(s, smoothing)
    assert operator_norms(found - expected) <= 6**0.5 * eps(dtype)
    assert convergence.converged


# --- report, steps, no synchronization -----------------------------------------------------------


@by_method
def test_report_is_the_distance_to_the_exact_factor(method):
    s = with_singular_values((6, 9), geometric(6, 3.0))
    smoothing = with_eigenvalues(1e-4 * geometric(6, 2.0), seed=1)
    options = {} if method == "eigh" else {"steps": 4}
    found, convergence = augmented_polar(s, smoothing, method, report=True, **options)
    expected, _ = oracle(s, smoothing)
    torch.testing.assert_close(
        convergence.residual, operator_norms(found - expected), rtol=0, atol=1e-9
    )
    assert convergence.residual.dtype == F64
    assert convergence.steps == options.get("steps", 0)
    assert convergence.tolerance == pytest.approx(math.sqrt(eps(F64)))
    assert convergence.converged == (method == "eigh")


@by_iteration
@pytest.mark.parametrize("dtype", FULL)
def test_report_tells_arrived_from_out_of_steps(method, dtype):
    s = with_singular_values((6, 8), torch.tensor([1, 1, 1, 1, 1, 1e-2], dtype=F64)).to(dtype)
    smoothing = 1e-6 * torch.eye(6, dtype=dtype)
    few, enough = (
        augmented_polar(s, smoothing, method, steps=steps, report=True)[1] for steps in (2, None)
    )
    assert not few.converged
    assert few.residual > 0.05
    if method != "coupled" or dtype is F64:  # its floor costs 16·√6·eps·1e4 of float32
        assert enough.converged
    assert enough.steps > 2


@by_iteration
def test_default_steps_reach_the_rank_tolerance_and_fewer_do_not(method):
    tolerance = 1e-3
    s = with_singular_values((6, 8), geometric(6, -math.log10(tolerance)))
    zero = torch.zeros(6, 6, dtype=F64)
    least = tolerance * 0.999
    convergence = augmented_polar(s, zero, method, rank_tolerance=least, report=True)[1]
    assert convergence.converged
    if method == "coupled":
        assert convergence.steps == coupled_steps(F64)
    few = augmented_polar(s, zero, method, steps=convergence.steps // 3, report=True)[1]
    assert not few.converged


def test_cubic_recursion_is_the_scalar_one_on_each_singular_value():
    """With S and Λ diagonal: x ← x(3 − b)/2, b ← b(3 − b)²/4, from [S L] over its norm."""
    sigma, root = torch.tensor([1, 0.3, 1e-3], dtype=F64), torch.tensor([0.2, 0.0, 0.1], dtype=F64)
    norm = (sigma.square().sum() + root.square().sum()).sqrt()
    rest = (root / norm).square()
    rest = rest + floor(F64) * torch.linalg.vector_norm(rest)
    for steps in range(1, 9):
        x, b = sigma / norm, (sigma / norm).square() + rest
        for _ in range(steps):
            x, b = x * (3 - b) / 2, b * ((3 - b) / 2) ** 2
        for restarts in ((), (3,), range(2, steps, 2)):
            found = augmented_polynomial(
                torch.diag(sigma),
                torch.diag(root.square()),
                (newton_schulz(),) * steps,
                restarts=restarts,
            )
            torch.testing.assert_close(found, torch.diag(x), rtol=1e-11, atol=1e-15)


def test_restarts_keep_float32_accurate():
    """Without them the floor of B hides small singular values, as the docstring says."""
    s = with_singular_values((24, 40), geometric(24, 3.4)).float()
    zero, cubic = torch.zeros(24, 24), (newton_schulz(),) * 26
    exact = augmented_polar(s, zero)
    kept = augmented_polynomial(s, zero, cubic, restarts=range(5, 26, 5))
    assert operator_norms(kept - exact) <= 1e-4
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


@pytest.mark.parametrize("name", ["polynomial", "coupled"])
def test_unchecked_functions_never_look_at_values(name):
    s, smoothing = normal(2, 4, 5), gram(normal(2, 4, 6))
    with FakeTensorMode() as mode:  # refuses every data-dependent value
        s, smoothing = mode.from_tensor(s), mode.from_tensor(smoothing)
        if name == "coupled":
            found = augmented_coupled(s, smoothing, 4)
        else:
            found = augmented_polynomial(s, smoothing, (newton_schulz(),) * 6, restarts=(3,))
        assert found.shape == s.shape


def test_input_is_not_changed():
    s, smoothing = normal(4, 6), gram(normal(4, 5))
    copies = s.clone(), smoothing.clone()
    for method in METHODS:
        augmented_polar(s, smoothing, method, report=True)
    assert torch.equal(s, copies[0])
    assert torch.equal(smoothing, copies[1])


# --- bad input -----------------------------------------------------------------------------------

S, EYE = torch.ones(2, 3), torch.eye(2)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([[1.0]], EYE), {}, TypeError, "s must be a torch.Tensor"),
        ((S, 1.0), {}, TypeError, "smoothing must be a torch.Tensor"),
        ((S.int(), EYE), {}, TypeError, "s must hold floating-point"),
        ((S, EYE.int()), {}, TypeError, "smoothing must hold floating-point"),
        ((S.cfloat(), EYE), {}, TypeError, "s must be real"),
        ((S.to_sparse(), EYE), {}, TypeError, "s must be dense"),
        ((S, EYE.to_sparse()), {}, TypeError, "smoothing must be dense"),
        ((torch.ones(3), EYE), {}, ValueError, "s must have at least two dimensions"),
        ((S, torch.ones(2)), {}, ValueError, "smoothing must have at least two dimensions"),
        ((S * math.nan, EYE), {}, ValueError, "s must be finite"),
        ((S * math.inf, EYE), {}, ValueError, "s must be finite"),
        ((S, EYE * math.nan), {}, ValueError, "smoothing must be finite"),
        ((S, torch.ones(2, 3)), {}, ValueError, "smoothing must be square"),
        ((S, torch.eye(3)), {}, ValueError, "smoothing must be 2×2 to act on the rows"),
        ((S, torch.tensor([[1.0, 1.0], [0.0, 1.0]])), {}, ValueError, "smoothing must be symm"),
        ((S, -EYE), {}, ValueError, "smoothing must be positive semidefinite"),
        ((S, EYE.double()), {}, TypeError, "smoothing has dtype torch.float64"),
        ((S.half(), EYE.half()), {}, TypeError, "smoothing has dtype torch.float16"),
        ((S, EYE.repeat(2, 1, 1)), {}, ValueError, "batch shape .* of smoothing does not"),
        ((S, EYE, "svd"), {}, ValueError, "method must be one of 'eigh', 'newton-schulz'"),
        ((S, EYE, "coupled"), {"steps": -1}, ValueError, "steps must be an integer"),
        ((S, EYE, "coupled"), {"steps": 1.5}, TypeError, "steps must be an integer"),
        ((S, EYE), {"steps": 3}, ValueError, "steps applies to the iterative methods"),
        ((S, EYE), {"rank_tolerance": 1.5}, ValueError, "rank_tolerance must lie in"),
        ((S, EYE, "coupled"), {"rank_tolerance": 0.0}, ValueError, "rank_tolerance must lie in"),
    ],
)
def test_bad_input(arguments, options, error, words):
    with pytest.raises(error, match=words):
        augmented_polar(*arguments, **options)


def test_every_iteration_agrees_on_the_fewest_steps():
    """The same number is refused, or accepted, whichever the method."""
    verdicts = set()
    for method in ITERATIVE:
        try:
            augmented_polar(S, EYE, method, steps=0)
            verdicts.add("accepted")
        except ValueError:
            verdicts.add("refused")
    assert len(verdicts) == 1


def test_the_rank_cut_does_not_depend_on_the_route():
    """κ = 1e4 takes the Gram route unless a singular value is to be cut."""
    s, zero = torch.diag(torch.tensor([1, 0.01], dtype=F64)), torch.zeros(2, 2, dtype=F64)
    found, convergence = augmented_polar(s, zero, rank_tolerance=0.1, report=True)
    assert torch.equal(found, torch.diag(torch.tensor([1, 0], dtype=F64)))
    assert convergence.converged


@by_method
@pytest.mark.parametrize(("shape", "rank"), [((16, 32), 3), ((64, 64), 8)])
def test_a_finished_low_rank_result_is_reported_converged(method, shape, rank):
    """Rounding noise off the range of [S L] is no sign of too few steps."""
    s = normal(shape[0], rank, dtype=torch.float32) @ normal(rank, shape[1], dtype=torch.float32)
    zero = torch.zeros(shape[0], shape[0])
    assert augmented_polar(s, zero, method, report=True)[1].converged


def test_an_ill_conditioned_neighbour_changes_nothing():
    good, bad = normal(5, 8), with_singular_values((5, 8), geometric(5, 12.0))
    zero = torch.zeros(2, 5, 5, dtype=F64)
    together = augmented_polar(torch.stack([good, bad]), zero)
    # A batch of the same route rounds apart by a few eps.
    torch.testing.assert_close(together[0], augmented_polar(good, zero[0]), rtol=0, atol=4e-15)
    assert operator_norms(together[1]) <= 1 + PROMISE[F64]
