"""(SSᵀ + Λ)^(-1/2) S from the smallest subnormal number to the largest one, of any rank.

Λ is rounded to its dtype, which below the smallest normal number is an absolute rounding: it may
be as indefinite as `_checks.positive_semidefinite` admits. The number of examples is that of the
hypothesis profile, so that `soak` looks further.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_half import clusters
from nucleon import moments
from nucleon.linalg import augmented_polar
from nucleon.linalg._rounding import floor
from nucleon.linalg.augmented import (
    METHODS,
    augmented_bfloat16,
    augmented_coupled,
    augmented_polynomial,
    augmented_svd,
)
from nucleon.linalg.coefficients import (
    contracted,
    half_polar_express,
    newton_schulz,
    polar_express,
)
from nucleon.linalg.half import half_augmented
from nucleon.linalg.kernels import lifted
from nucleon.optim.polar_methods import polynomials
from strategies import (
    F64,
    FULL,
    HALF,
    at_scale,
    discounted,
    ends,
    eps,
    geometric,
    normal,
    operator_norms,
    ranged_problems,
    ranked,
    seeds,
    semidefinite,
    times_power_of_two,
    whole_range,
    with_eigenvalues,
    work_dtype,
)

DTYPES = FULL + HALF
few = settings(max_examples=settings.default.max_examples // 5)
by_method = pytest.mark.parametrize("method", METHODS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
# DESIGN's contract for ‖P‖_op: the references, then the iterations.
REFERENCE = {F64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
ITERATIVE = REFERENCE | {F64: 1e-3, torch.float32: 1e-3}


def smallest(dtype):
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def contract(method, dtype):
    return 1 + (REFERENCE if method == "eigh" else ITERATIVE)[dtype]


def assert_in_the_ball(p, limit):
    assert torch.isfinite(p).all()
    assert (operator_norms(p) <= limit).all()


def oracle(s, smoothing):
    """The exact factor, the eigenvalues of SSᵀ + Λ₊ and ‖Λ‖_F; all in units of 2^-e, 4^-e, 4^-e, e.

    By NumPy's SVD of [S L], from exactly rescaled float64.
    """
    powers = [math.frexp(x.abs().max().item())[1] for x in (s.double(), smoothing.double())]
    e = max(powers[0] if s.any() else -3000, -(-powers[1] // 2) if smoothing.any() else -3000)
    x = times_power_of_two(s.double(), -e).numpy()
    rest = times_power_of_two(smoothing.double(), -2 * e if smoothing.any() else 0).numpy()
    values, vectors = np.linalg.eigh(rest)
    factor = vectors * np.sqrt(values.clip(0))
    u, sigma, vt = np.linalg.svd(np.hstack([x, factor]), full_matrices=False)
    return torch.from_numpy(u @ vt[:, : s.shape[-1]]), sigma, np.linalg.norm(rest), e


def error_bound(method, s, smoothing, sigma, rest, e):
    """To first order a change E of SSᵀ + Λ turns the factor by ‖E‖/(2λ_min), λ_min = σ_min².

    "eigh" changes it by the roundings of float64. The others work in float32 or float64, add a
    floor of 32 eps·‖Λ‖_F, "coupled" one of 32 eps·‖SSᵀ + Λ‖_F ≤ 32 eps·√m·σ_max², and lift Λ by
    32m of the smallest number at most; Λ₊ of the oracle is as far from Λ again. Their Gram
    products round by (m + n) eps·σ_max², and the restarts by a hundred eps.
    """
    m, n = s.shape
    work = work_dtype(s.dtype)
    condition = (sigma[0] / sigma[-1]) ** 2
    rounding = math.sqrt(m) * eps(s.dtype) / 2  # of the result
    if method == "eigh":
        return REFERENCE[s.dtype] + 10 * m * eps(F64) * math.sqrt(condition) * (
            1 + rest / (sigma[0] * sigma[-1])
        )
    lift = 32 * m * math.ldexp(smallest(work), -2 * e) if rest else 0.0
    size = math.sqrt(m) * sigma[0] ** 2 if method == "coupled" else rest
    change = 2 * (floor(work) * size + min(lift, m * rest)) / sigma[-1] ** 2 / 2
    return change + eps(work) * ((m + n) * condition + 100) + rounding


@by_method
@by_dtype
@few
@given(data=st.data())
def test_in_the_ball_and_as_exact_as_the_condition_allows(method, dtype, data):
    s, smoothing = data.draw(ranged_problems(dtype))
    found = augmented_polar(s, smoothing, method)
    assert_in_the_ball(found, contract(method, dtype))
    if not s.any():
        assert not found.any()
        return
    expected, sigma, rest, e = oracle(s, smoothing)
    # The reference cuts at √m·eps, and the iterations resolve down to √eps: beyond, no promise.
    if sigma[-1] <= 2 * math.sqrt(len(sigma)) * eps(work_dtype(dtype)) * sigma[0]:
        return
    bound = error_bound(method, s, smoothing, sigma, rest, e)
    assert operator_norms(found - expected) <= bound


@by_method
@by_dtype
def test_the_table(method, dtype):
    """Shape × rank × condition × scale of S × rank, condition and scale of Λ."""
    (least, most), (low, high) = ends(dtype), ends(work_dtype(dtype))
    tops = (least + 2, math.frexp(torch.finfo(dtype).tiny)[1], 0, most)
    for shape, share, log_cond, top in product(
        ((1, 5), (6, 6), (9, 4)), (0.5, 1), (0, 3, 12), tops
    ):
        m = shape[0]
        s = ranked(shape, math.ceil(share * min(shape)), log_cond, top, dtype, seed=m)
        for power in (low + 3, min(max(2 * top, low), high), high):
            values = geometric(m, log_cond, math.ceil(share * m))
            smoothing = at_scale(with_eigenvalues(values, seed=7), power, work_dtype(dtype))
            found = augmented_polar(s, smoothing, method)
            assert_in_the_ball(found, contract(method, dtype))


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
    found = augmented_polar(s, 3 * smallest(dtype) * torch.eye(m, dtype=dtype), method)
    torch.testing.assert_close(found.double(), expected, rtol=100 * eps(dtype), atol=0)
    dense = with_eigenvalues(torch.tensor([1, 1, 0.5, 0.5], dtype=F64))
    smoothing = (dense * q * m * smallest(dtype)).to(dtype)
    values, vectors = np.linalg.eigh(smoothing.double().numpy() / smallest(dtype))
    root = vectors / np.sqrt(values) @ vectors.T / math.sqrt(smallest(dtype))
    exact = torch.from_numpy(root @ s.double().numpy())
    error = operator_norms(augmented_polar(s, smoothing, method) - exact)
    assert error <= 2.0**-6 * operator_norms(exact)


# --- the fixed-step functions of the optimizers ---------------------------------------------------


def quintics(steps):
    return contracted(polar_express(1e-3, steps))


FIXED = {
    "five quintics": lambda s, r: augmented_polynomial(s, r, quintics(5), restarts=()),
    "eight quintics": lambda s, r: augmented_polynomial(s, r, quintics(8), restarts=range(2, 8, 2)),
    "fifteen cubics": lambda s, r: augmented_polynomial(
        s, r, (newton_schulz(),) * 15, restarts=range(5, 15, 5)
    ),
    "coupled": lambda s, r: augmented_coupled(s, r, 15),
    "svd": lambda s, r: augmented_svd(
        s.double(), r.double(), math.sqrt(s.shape[-2]) * eps(s.dtype)
    ).to(s.dtype),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("dtype", FULL)
@few
@given(data=st.data())
def test_fixed_steps_stay_in_the_ball(name, dtype, data):
    s, smoothing = data.draw(ranged_problems(dtype))
    found = FIXED[name](s, smoothing)
    assert found.dtype == dtype
    limit = REFERENCE[dtype] if name == "svd" else 1e-3
    assert_in_the_ball(found, 1 + limit)
    assert s.any() or not found.any()


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
        found = augmented_coupled(stack, smoothing, 15)
    else:
        found = augmented_polynomial(stack, smoothing, polynomials("polar-express", 5), restarts=())
    assert_in_the_ball(found, 1 + 1e-3)


@pytest.mark.parametrize("dtype", FULL)
@few
@given(data=st.data())
def test_half_steps_stay_in_the_ball(dtype, data):
    s, smoothing = data.draw(ranged_problems(dtype))
    s = s if s.shape[0] <= s.shape[1] else s.mT.contiguous()
    if smoothing.shape[-1] != s.shape[0]:
        smoothing = smoothing[: s.shape[0], : s.shape[0]]
    found = half_augmented(s[None], smoothing[None], half_polar_express(5))
    assert_in_the_ball(found, 1 + 1e-2)


NARROW = {
    "half": lambda s, r: half_augmented(s, r, half_polar_express(5)),
    "bfloat16": lambda s, r: augmented_bfloat16(s, r, polynomials("bfloat16", 5)),
}


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("steps", [2, 5, 8])
@few
@given(data=st.data())
def test_bfloat16_steps_stay_in_the_ball(dtype, steps, data):
    s, smoothing = data.draw(ranged_problems(dtype))
    found = augmented_bfloat16(s, smoothing, polynomials("bfloat16", steps))
    assert found.dtype == dtype
    assert_in_the_ball(found, 1 + 1e-2)
    assert s.any() or not found.any()


@pytest.mark.parametrize("dtype", FULL)
def test_bfloat16_with_rows_whose_squares_are_no_numbers(dtype):
    """Parallel rows, one so small that the rounding of its square is as large as the square."""
    row = normal(1, 7, seed=3)
    for power in range(math.frexp(smallest(dtype))[1] // 2 - 2, 0):
        s = torch.cat([times_power_of_two(row, power), row]).to(dtype)
        found = NARROW["bfloat16"](s, torch.zeros(2, 2, dtype=dtype))
        assert operator_norms(found - s / operator_norms(s)) <= 0.1


def test_bfloat16_with_columns_whose_sum_rounds_more_than_the_rows_allow():
    for seed in range(40):
        s = normal(2, 1, seed=seed).float() @ normal(1, 100_000, seed=seed + 1).abs().float()
        found = NARROW["bfloat16"](s, torch.zeros(2, 2))
        assert operator_norms(found - s / operator_norms(s)) <= 0.1


@pytest.mark.parametrize("m", [2, 3, 6])
def test_bfloat16_factors_the_sums_that_rounding_made_indefinite(m):
    """M̂ of the same gradient for ever, as small a discount as `floor` has room for."""
    gradients = (normal(200, m, 1, seed=m) @ normal(200, 1, 9, seed=m + 1)).float()
    smoothing = torch.zeros(200, m, m)
    for _ in range(400):
        smoothing = moments.accumulate_gram(smoothing, gradients, 0.984**0.5)
    s = gradients * 8  # as large as √‖M̂‖: singular values of 1/√2
    found = NARROW["bfloat16"](s, smoothing)
    exact = augmented_svd(s.double(), smoothing.double(), 1e-3)
    assert operator_norms(found - exact).max() <= 0.1


@pytest.mark.parametrize("name", [*FIXED, "bfloat16"])
@pytest.mark.parametrize("dtype", FULL)
def test_a_polar_factor_at_the_ends_of_the_range(name, dtype):
    """Without Λ the scale of S changes no bit, whether ‖S‖_F and its inverse are numbers or not."""
    signs = torch.tensor(
        [[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1]], dtype=dtype
    )
    zero = torch.zeros(4, 4, dtype=dtype)
    run = (FIXED | NARROW)[name]
    expected = run(signs, zero)
    assert expected.any()
    for power in ends(dtype):
        assert torch.equal(run(times_power_of_two(signs, power), zero), expected)


@pytest.mark.parametrize("name", [*FIXED, *NARROW])
@pytest.mark.parametrize("momentum_rounds", [1, 30, 200])
def test_gradients_that_fade_into_the_subnormal_range(name, momentum_rounds):
    """Gram sums at every scale from 2^-149 to 2^-100, beside totals of the same gradients."""
    grams, totals = [], []
    for power in range(-149, -100):
        grams.append(discounted(8, power, torch.float32, seed=-power, rounds=momentum_rounds))
        totals.append(at_scale(normal(8, 12, seed=power % 97), power // 2, torch.float32))
    smoothing, s = torch.stack(grams), torch.stack(totals)
    found = (FIXED | NARROW)[name](s, smoothing)
    assert_in_the_ball(found, 1.01 if name in NARROW else 1.001)


# --- the lift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FULL)
@few
@given(data=st.data())
def test_lifted_matrices_are_semidefinite_up_to_relative_rounding(dtype, data):
    m = data.draw(st.sampled_from([1, 2, 5, 17]))
    a = data.draw(semidefinite(m, dtype, data.draw(whole_range(dtype))))
    raised = lifted(a)
    e = math.frexp(raised.abs().max().item())[1]
    unit = times_power_of_two(raised.double(), -e).numpy()
    assert np.linalg.eigvalsh(unit)[0] >= -floor(dtype) * np.linalg.norm(unit)


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
