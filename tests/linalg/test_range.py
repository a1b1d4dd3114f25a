"""Roots, polar factors, norms and projections from the smallest subnormal number to the largest.

Any rank and condition number, every dtype; the oracle is NumPy in float64 on exactly rescaled
matrices. The number of examples is that of the hypothesis profile, so that `soak` looks further.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg import (
    inverse_sqrt,
    nuclear_norm,
    operator_norm,
    polar,
    project_operator_ball,
    quadratic_projection,
)
from nucleon.linalg.coefficients import (
    contracted,
    half_polar_express,
    newton_schulz,
    polar_express,
)
from nucleon.linalg.half import half_polar
from nucleon.linalg.norms import operator_norm_bound
from nucleon.linalg.polar import METHODS as POLAR
from nucleon.linalg.polar import (
    polar_bfloat16,
    polar_polynomial,
    polar_qdwh,
    polar_scaled_newton,
    polar_svd,
)
from nucleon.linalg.roots import METHODS as ROOTS
from nucleon.linalg.roots import coupled_inverse_sqrt, coupled_steps
from nucleon.optim.polar_methods import polynomials
from strategies import (
    F64,
    FULL,
    HALF,
    at_scale,
    ends,
    eps,
    geometric,
    normal,
    operator_norms,
    ranged,
    ranked,
    semidefinite,
    times_power_of_two,
    whole_range,
    with_eigenvalues,
    work_dtype,
)

few = settings(max_examples=settings.default.max_examples // 5)
by_dtype = pytest.mark.parametrize("dtype", FULL + HALF)
# DESIGN's contract for ‖P‖_op: the references, then the iterations.
REFERENCE = {F64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
ITERATIVE = REFERENCE | {F64: 1e-3, torch.float32: 1e-3}


def smallest(dtype):
    info = torch.finfo(dtype)
    return info.tiny * info.eps


def unit(x):
    """x·2^-e in float64, its largest entry in [½, 1), and e; exact."""
    x = x.double()
    e = math.frexp(x.abs().max().item())[1] if x.any() else 0
    return times_power_of_two(x, -e), e


def table(dtype):
    """Shape × rank × condition × scale."""
    least, most = ends(dtype)
    tops = (least + 2, math.frexp(torch.finfo(dtype).tiny)[1], 0, most)
    shapes = ((1, 5), (6, 6), (4, 9), (9, 4))
    for shape, share, log_cond, top in product(shapes, (0, 0.5, 1), (0, 3, 12), tops):
        yield ranked(shape, math.ceil(share * min(shape)), log_cond, top, dtype, seed=shape[0])


# --- inverse roots --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROOTS)
@by_dtype
@few
@given(data=st.data())
def test_inverse_roots_are_finite(method, dtype, data):
    m = data.draw(st.sampled_from([1, 2, 5, 17]))
    a = data.draw(semidefinite(m, dtype, data.draw(whole_range(dtype))))
    found = inverse_sqrt(a, method)
    assert found.dtype == dtype
    assert torch.isfinite(found).all()
    assert a.any() or not found.any()
    check_root(found, a, method)


def check_root(found, a, method):
    """To first order A + E changes A^(-1/2) by a relative ½‖E‖/λ_min up to log m.

    "eigh": E is the rounding of float64. The iteration adds 32 eps·‖A‖_F of float32 or float64, a
    lift of at most 32m of the smallest numbers (in half precision what λ_min is below 0, here
    nothing, and 4/max²) and rounds its products by 4m eps·‖A‖.
    """
    dtype, m = a.dtype, a.shape[-1]
    exact, e = unit(a)
    values, vectors = np.linalg.eigh(exact.numpy())
    condition = values[-1] / values[0] if values[0] > 0 else math.inf
    if condition * 2 * math.sqrt(m) * eps(dtype) >= 1:
        return  # "eigh" cuts at √m·eps
    half = e // 2
    expected = vectors / np.sqrt(values * 2.0 ** (e - 2 * half)) @ vectors.T
    back = times_power_of_two(found.double(), half).numpy()
    error = np.linalg.norm(back - expected, 2) / np.linalg.norm(expected, 2)
    bound = 2 * m * eps(F64) * condition + math.sqrt(m) * eps(dtype)
    if method == "newton-schulz":
        work = work_dtype(dtype)
        lift = 32 * m * smallest(dtype) if dtype in FULL else 4 * torch.finfo(dtype).max ** -2
        bound += (16 * math.sqrt(m) + 4 * m) * eps(work) * condition
        bound += math.ldexp(lift, -e) / values[0]
    # The result may be subnormal itself only in half precision, whose inverse roots are ≥ 2^-8.
    assert error <= bound


@pytest.mark.parametrize("method", ROOTS)
@by_dtype
def test_the_table_of_inverse_roots(method, dtype):
    least, most = ends(dtype)
    for m, share, log_cond, top in product((1, 4, 9), (0, 0.5, 1), (0, 2, 12), (least, 0, most)):
        values = geometric(m, log_cond, math.ceil(share * m))
        a = at_scale(with_eigenvalues(values, seed=m), top, dtype)
        found = inverse_sqrt(a, method)
        assert torch.isfinite(found).all()
        check_root(found, a, method)


@pytest.mark.parametrize("method", ROOTS)
def test_a_root_that_half_precision_cannot_hold(method):
    """float16 ends at 65504, the inverse root of 2^-32: smaller eigenvalues count as zero.

    The determinant of these whole numbers is 1, so the eigenvalues are about 843 and 1/843, here
    of 2^-24: the inverse root of the smaller one is 1.2e5.
    """
    a = (2.0**-24 * torch.tensor([[610, 377], [377, 233]], dtype=F64)).half()
    assert torch.linalg.eigvalsh(a.double())[0] ** -0.5 > 1e5
    assert torch.isfinite(inverse_sqrt(a, method, rank_tolerance=0.0)).all()


@pytest.mark.parametrize("power", [-148, -100, -60, 0, 60, 120])
def test_the_coupled_root_at_any_scale(power):
    """Unchecked, and not rescaled by its caller: ‖A‖_F² is no float32 from 2^±64 on."""
    values = torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=F64)
    a = torch.diag(values * 2.0**power).float()
    found = coupled_inverse_sqrt(a, coupled_steps(torch.float32))
    expected = torch.eye(4, dtype=F64) * 2.0 ** (-power / 2)
    torch.testing.assert_close(found.double(), expected, rtol=64 * eps(torch.float32), atol=0)


# --- polar factors --------------------------------------------------------------------------------


def check_polar(p, s, method):
    """Finite, in the ball, and where all of S counts within the rounding of its condition."""
    dtype, work = s.dtype, work_dtype(s.dtype)
    assert torch.isfinite(p).all()
    assert operator_norms(p) <= 1 + (REFERENCE if method == "svd" else ITERATIVE)[dtype]
    assert s.any() or not p.any()
    u, sigma, vt = np.linalg.svd(unit(s)[0].numpy(), full_matrices=False)
    tolerance = math.sqrt(len(sigma)) * eps(work) if method == "svd" else math.sqrt(eps(work))
    if sigma[-1] <= 2 * tolerance * sigma[0]:
        return
    # A change F of S turns the factor by ‖F‖/σ_min; F is (m + n) eps·‖S‖ in every product, and
    # the steps end eps^¾ before 1.
    rounding = 10 * sum(s.shape) * eps(F64 if method == "svd" else work) * sigma[0] / sigma[-1]
    bound = rounding + eps(work) ** 0.75 + math.sqrt(len(sigma)) * eps(dtype)
    assert operator_norms(p - torch.from_numpy(u @ vt)) <= bound


@pytest.mark.parametrize("method", POLAR)
@by_dtype
@few
@given(data=st.data())
def test_polar_factors(method, dtype, data):
    s = data.draw(ranged(dtype))
    check_polar(polar(s, method), s, method)


@pytest.mark.parametrize("method", POLAR)
@by_dtype
def test_the_table_of_polar_factors(method, dtype):
    for s in table(dtype):
        check_polar(polar(s, method), s, method)


FIXED = {
    "quintics": lambda s: polar_polynomial(s, contracted(polar_express(1e-3, 5))),
    "cubics": lambda s: polar_polynomial(s, [newton_schulz()] * 12),
    "scaled Newton": lambda s: polar_scaled_newton(s, 6),
    "QDWH": lambda s: polar_qdwh(s, 5),
    "svd": polar_svd,
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("dtype", FULL)
@few
@given(data=st.data())
def test_fixed_steps_stay_in_the_ball(name, dtype, data):
    s = data.draw(ranged(dtype))
    p = FIXED[name](s)
    assert torch.isfinite(p).all()
    assert operator_norms(p) <= 1 + (REFERENCE[dtype] if name == "svd" else 1e-3)
    assert s.any() or not p.any()


@pytest.mark.parametrize("dtype", FULL)
@few
@given(data=st.data())
def test_half_steps_stay_in_the_ball(dtype, data):
    s = data.draw(ranged(dtype))
    s = s if s.shape[0] <= s.shape[1] else s.mT
    p = half_polar(s[None], half_polar_express(5))
    assert torch.isfinite(p).all()
    assert operator_norms(p) <= 1 + 1e-2


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("steps", [2, 5, 8])
@few
@given(data=st.data())
def test_bfloat16_steps_stay_in_the_ball(dtype, steps, data):
    s = data.draw(ranged(dtype))
    p = polar_bfloat16(s, polynomials("polar-express", steps))
    assert p.dtype == dtype
    assert operator_norms(p) <= 1 + 1e-2
    assert s.any() or not p.any()


# --- norms ----------------------------------------------------------------------------------------


@by_dtype
@few
@given(data=st.data())
def test_norms(dtype, data):
    """Relative to one rounding of the dtype and one SVD; infinite where the norm is no number."""
    check_norms(data.draw(ranged(dtype)))


@by_dtype
def test_the_table_of_norms(dtype):
    for x in table(dtype):
        check_norms(x)


def check_norms(x):
    scaled, e = unit(x)
    sigma = np.linalg.svd(scaled.numpy(), compute_uv=False)
    info = torch.finfo(x.dtype)
    relative = 4 * sum(x.shape) * eps(work_dtype(x.dtype)) + info.eps
    for function, value in ((operator_norm, sigma[0]), (nuclear_norm, sigma.sum())):
        found = function(x).item()
        if math.frexp(value * (1 - relative))[1] + e > math.frexp(info.max)[1]:
            assert found == math.inf
        elif math.frexp(value * (1 + relative))[1] + e <= math.frexp(info.max)[1]:
            expected = math.ldexp(value, e)
            assert abs(found - expected) <= relative * expected + smallest(x.dtype)
    if x.dtype in FULL:
        bound = operator_norm_bound(x).double().item()
        least = sigma[0] * (1 - relative)
        assert bound == math.inf or bound >= math.ldexp(least, e) - smallest(x.dtype)


# --- projections ----------------------------------------------------------------------------------


@by_dtype
@few
@given(data=st.data())
def test_projections(dtype, data):
    """U min(Σ, r) Vᵀ, for radii about ‖X‖_op and anywhere in the range."""
    x = data.draw(ranged(dtype))
    radius = 2.0 ** data.draw(whole_range(dtype))
    if data.draw(st.booleans()) and x.any():
        radius = min(x.double().abs().max().item() * data.draw(st.floats(0.1, 3)), 1e308)
    check_projection(x, radius)


@by_dtype
def test_the_table_of_projections(dtype):
    for x in table(dtype):
        for radius in (0.0, smallest(dtype), 1.0, x.double().abs().max().item() / 2):
            check_projection(x, radius)


def check_projection(x, radius):
    p = project_operator_ball(x, radius)
    assert torch.isfinite(p).all()
    # The entries are rounded once, those below the normal numbers by half of the smallest.
    m, n = x.shape
    share = math.sqrt(m * n) * smallest(x.dtype)
    scale, e = unit(x)
    u, sigma, vt = np.linalg.svd(scale.numpy(), full_matrices=False)
    power = math.frexp(radius)[1] - e
    limit = math.ldexp(radius, -e) if power < 1000 or not radius else 1e300
    expected = torch.from_numpy((u * np.minimum(sigma, limit)) @ vt)
    found = times_power_of_two(p.double(), -e)
    slack = 1e-9 + math.sqrt(min(m, n)) * eps(x.dtype)
    absolute = math.ldexp(share, -e)
    assert operator_norms(found) <= limit * (1 + slack) + absolute
    assert operator_norms(found - expected) <= slack * min(limit, sigma[0]) + absolute + 1e-13


@pytest.mark.parametrize("solver", ["projected-gradient", "frank-wolfe", "douglas-rachford"])
@by_dtype
@few
@given(data=st.data())
def test_quadratic_projections(solver, dtype, data):
    """Finite and feasible whatever the scales; the gap bounds the distance to the minimum."""
    s = data.draw(ranged(dtype))
    work = work_dtype(dtype)
    left = data.draw(semidefinite(s.shape[0], work, data.draw(whole_range(work))))
    found = quadratic_projection(s, left, solver=solver, max_iterations=20)
    assert torch.isfinite(found.x).all()
    assert operator_norms(found.x) <= 1 + REFERENCE[dtype]
    assert found.gap >= 0


def test_the_polar_factor_of_noise_is_none():
    """A deficient matrix keeps its rank at every scale that leaves its entries normal."""
    for dtype, power in product(FULL, (-100, 0, 100)):
        s = at_scale(normal(6, 2, seed=1) @ normal(2, 9, seed=2), power, dtype)
        assert torch.linalg.matrix_rank(polar(s).double(), atol=1e-3) == 2
