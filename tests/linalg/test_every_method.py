"""The contract of polar factors, augmented polar factors and inverse roots.

Function × method × dtype × shape × rank × condition × scale, from the smallest subnormal number to
the largest one: finite, in the ball, 0 for 0, and as near to NumPy's float64 SVD of the exactly
rescaled matrices as the condition allows. The number of examples is that of the hypothesis
profile, so that `soak` looks further.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from nucleon.linalg import augmented as aug
from nucleon.linalg import augmented_polar, inverse_sqrt, polar
from nucleon.linalg._precision import floor
from nucleon.linalg.coefficients import (
    bound_for,
    contracted,
    half_polar_express,
    newton_schulz,
    polar_express,
)
from nucleon.linalg.half import half_augmented, half_polar
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
from strategies import (
    EMPTY,
    F64,
    FULL,
    HALF,
    ITERATIVE,
    REFERENCE,
    at_scale,
    ends,
    eps,
    geometric,
    gram,
    normal,
    operator_norms,
    orthogonal,
    ranged,
    ranged_problems,
    ranked,
    seeds,
    semidefinite,
    shapes,
    smallest,
    symmetrized,
    times_power_of_two,
    unit,
    whole_range,
    with_eigenvalues,
    with_singular_values,
    work_dtype,
)

few = settings(max_examples=settings.default.max_examples // 5)

# Products of half precision.
NARROW = dict.fromkeys(FULL, 1e-2)


@dataclass(frozen=True)
class Case:
    """A function of (S, Λ), of S alone or of A alone."""

    kind: str
    run: Callable
    excess: dict | None = None
    method: str = ""
    """Empty for a fixed number of steps, which promises the ball alone."""

    def of(self, s, a):
        """The arguments of the case."""
        return {"polar": (s,), "augmented": (s, a), "root": (a,)}[self.kind]


def quintics(steps: int):
    return contracted(polar_express(bound_for("polar-express", steps), steps))


def on_wide(function, s, smoothing=None):
    """half precision takes stacks of wide matrices."""
    tall = s.shape[-2] > s.shape[-1]
    x = (s.mT if tall else s).reshape(-1, *sorted(s.shape[-2:]))
    m = x.shape[-2]
    rest = () if smoothing is None else (smoothing[..., :m, :m].reshape(-1, m, m),)
    p = function(x, *rest, half_polar_express(5)).reshape(*s.shape[:-2], *x.shape[-2:])
    return p.mT if tall else p


def excess(method):
    return REFERENCE if method in ("svd", "eigh") else ITERATIVE


FUNCTIONS = {
    "polar": (polar, POLAR),
    "augmented": (augmented_polar, aug.METHODS),
    "root": (inverse_sqrt, ROOTS),
}
CHECKED = {
    f"{kind} {m}": Case(kind, partial(f, method=m), None if kind == "root" else excess(m), m)
    for kind, (f, methods) in FUNCTIONS.items()
    for m in methods
}

CUBIC, recursion = [newton_schulz()], aug.augmented_polynomial
OF_S = {
    "quintics": partial(polar_polynomial, sequence=quintics(5)),
    "cubics": partial(polar_polynomial, sequence=CUBIC * 12),
    "scaled Newton": partial(polar_scaled_newton, steps=6, lower_bound=1e-4),
    "QDWH": partial(polar_qdwh, steps=5, lower_bound=1e-4),
    "svd": polar_svd,
    "half": partial(on_wide, half_polar),
    **{f"bfloat16, {k} steps": partial(polar_bfloat16, sequence=quintics(k)) for k in (2, 5, 8)},
}
OF_BOTH = {
    "augmented, five quintics": partial(recursion, sequence=quintics(5), restarts=()),
    "augmented, eight": partial(recursion, sequence=quintics(8), restarts=range(2, 8, 2)),
    "augmented, cubics": partial(recursion, sequence=CUBIC * 15, restarts=range(5, 15, 5)),
    "augmented, coupled": partial(aug.augmented_coupled, steps=15),
    "augmented svd": lambda s, r: aug.augmented_svd(
        s.double(), r.double(), math.sqrt(s.shape[-2]) * eps(s.dtype)
    ).to(s.dtype),
    "augmented half": partial(on_wide, half_augmented),
    **{
        f"augmented bfloat16, {k} steps": partial(aug.augmented_bfloat16, sequence=quintics(k))
        for k in (2, 5, 8)
    },
}
FIXED = {
    name: Case(kind, run, NARROW if "half" in name or "16" in name else excess(name.split()[-1]))
    for kind, runs in (("polar", OF_S), ("augmented", OF_BOTH))
    for name, run in runs.items()
}
CASES = CHECKED | FIXED
MATRIX = [(name, t) for name, c in CHECKED.items() for t in FULL + HALF * (c.kind != "root")]
MATRIX += [(name, dtype) for name in FIXED for dtype in FULL]
by_case = pytest.mark.parametrize(("name", "dtype"), MATRIX, ids=lambda x: str(x).split(".")[-1])
checked = pytest.mark.parametrize("name", CHECKED)


@st.composite
def problems(draw, kind, dtype):
    """The arguments of a case: any shape, rank, condition number and scale."""
    if kind == "augmented":
        return tuple(draw(ranged_problems(dtype)))
    if kind == "polar":
        return (draw(ranged(dtype)),)
    m = draw(st.sampled_from([1, 2, 5, 17]))
    return (draw(semidefinite(m, dtype, draw(whole_range(dtype)))),)


def table(kind, dtype):
    """Stacks of problems of one shape: rank × condition × scale, of Λ beside each too."""
    (least, most), work = ends(dtype), work_dtype(dtype)
    low, high = ends(work)
    tops = (least + 2, math.frexp(torch.finfo(dtype).tiny)[1], 0, most)
    spectra = list(product((0, 0.5, 1), (0, 3, 12), tops))
    if kind == "root":
        for m in (1, 4, 9):
            spectrum = [geometric(m, c, math.ceil(share * m)) for share, c, _ in spectra]
            yield (torch.stack([
                at_scale(with_eigenvalues(values, seed=m), top, dtype)
                for values, (_, _, top) in zip(spectrum, spectra, strict=True)
            ]),)  # fmt: skip
        return
    for shape in ((1, 5), (6, 6), (4, 9), (9, 4)):
        m, k = shape[0], min(shape)
        s = [ranked(shape, math.ceil(r * k), c, top, dtype, seed=m) for r, c, top in spectra]
        if kind == "polar":
            yield (torch.stack(s),)
            continue
        smoothing = [
            at_scale(with_eigenvalues(geometric(m, c, math.ceil(r * m)), seed=7), power, work)
            for r, c, top in spectra
            for power in (low + 3, min(max(2 * top, low), high), high)
        ]
        yield torch.stack(s).repeat_interleave(3, dim=0), torch.stack(smoothing)


def check(case, result, *arguments):
    """The promises for one matrix."""
    s, dtype = arguments[0], arguments[0].dtype
    assert result.dtype == dtype or case.excess is NARROW
    assert result.shape == s.shape
    assert torch.isfinite(result).all()
    if case.excess is not None:
        assert operator_norms(result) <= 1 + case.excess[dtype]
    if not s.any():
        assert not result.any()
    elif case.method:
        ERRORS[case.kind](case.method, result, *arguments)


def check_polar(method, p, s):
    """A change F of S turns the factor by ‖F‖/σ_min: (m + n) eps·‖S‖ in every product.

    Steps end eps^¾ before 1, and the last rounding is ‖ΔP‖_F ≤ eps/2·‖P‖_F; singular values that
    do not count are left to the ball.
    """
    work = work_dtype(s.dtype)
    u, sigma, vt = np.linalg.svd(unit(s)[0].numpy(), full_matrices=False)
    tolerance = math.sqrt(len(sigma)) * eps(work) if method == "svd" else math.sqrt(eps(work))
    if sigma[-1] <= 2 * tolerance * sigma[0]:
        return
    rounding = 10 * sum(s.shape) * eps(F64 if method == "svd" else work) * sigma[0] / sigma[-1]
    short = 0.0 if method == "svd" else eps(work) ** 0.75
    bound = rounding + short + math.sqrt(len(sigma)) * eps(s.dtype) / 2
    assert operator_norms(p - torch.from_numpy(u @ vt)) <= bound


def check_augmented(method, p, s, smoothing):
    """To first order a change E of SSᵀ + Λ turns the factor by ‖E‖/(2λ_min), λ_min = σ_min².

    "eigh" changes it by the roundings of float64. The others work in float32 or float64, add a
    floor of 32 eps·‖Λ‖_F, "coupled" one of 32 eps·‖SSᵀ + Λ‖_F ≤ 32 eps·√m·σ_max², and lift Λ by
    32m of the smallest number at most; Λ₊ of the oracle is as far from Λ again. Their Gram
    products round by (m + n) eps·σ_max², and the restarts by a hundred eps.
    """
    (m, n), work = s.shape, work_dtype(s.dtype)
    exact, sigma, rest, e = exact_augmented(s, smoothing)
    if sigma[-1] <= 2 * math.sqrt(m) * eps(work) * sigma[0]:
        return
    condition, rounding = (sigma[0] / sigma[-1]) ** 2, math.sqrt(m) * eps(s.dtype) / 2
    if method == "eigh":
        bound = REFERENCE[s.dtype] + 10 * m * eps(F64) * math.sqrt(condition) * (
            1 + rest / (sigma[0] * sigma[-1])
        )
    else:
        lift = min(32 * m * math.ldexp(smallest(work), -2 * e), m * rest) if rest else 0.0
        size = math.sqrt(m) * sigma[0] ** 2 if method == "coupled" else rest
        change = (floor(work) * size + lift) / sigma[-1] ** 2
        bound = change + eps(work) * ((m + n) * condition + 100) + rounding
    assert operator_norms(p - exact) <= bound


def exact_augmented(s, smoothing):
    """P, the singular values of [S L] and ‖Λ‖_F in units of 2^e and 4^e, and e; by NumPy's SVD."""
    powers = [math.frexp(x.double().abs().max().item())[1] for x in (s, smoothing)]
    e = max(powers[0] if s.any() else -3000, -(-powers[1] // 2) if smoothing.any() else -3000)
    x = times_power_of_two(s.double(), -e).numpy()
    rest = times_power_of_two(smoothing.double(), -2 * e if smoothing.any() else 0).numpy()
    values, vectors = np.linalg.eigh(rest)
    joined = np.hstack([x, vectors * np.sqrt(values.clip(0))])
    u, sigma, vt = np.linalg.svd(joined, full_matrices=False)
    return torch.from_numpy(u @ vt[:, : s.shape[-1]]), sigma, np.linalg.norm(rest), e


def check_root(method, result, a):
    """To first order A + E changes A^(-1/2) by a relative ½‖E‖/λ_min up to log m.

    "eigh": E is the rounding of float64. The iteration adds 32 eps·‖A‖_F, a lift of at most 32m of
    the smallest numbers and rounds its products by 4m eps·‖A‖.
    """
    dtype, m = a.dtype, a.shape[-1]
    exact, e = unit(a)
    values, vectors = np.linalg.eigh(exact.numpy())
    condition = values[-1] / values[0] if values[0] > 0 else math.inf
    if condition * 2 * math.sqrt(m) * eps(dtype) >= 1:
        return  # "eigh" cuts at √m·eps
    half = e // 2
    expected = vectors / np.sqrt(values * 2.0 ** (e - 2 * half)) @ vectors.T
    back = times_power_of_two(result.double(), half).numpy()
    error = np.linalg.norm(back - expected, 2) / np.linalg.norm(expected, 2)
    bound = 2 * m * eps(F64) * condition + math.sqrt(m) * eps(dtype)
    if method == "newton-schulz":
        bound += (16 * math.sqrt(m) + 4 * m) * eps(dtype) * condition
        bound += math.ldexp(32 * m * smallest(dtype), -e) / values[0]
    assert error <= bound


ERRORS = {"polar": check_polar, "augmented": check_augmented, "root": check_root}


@by_case
@few
@given(data=st.data())
def test_every_input(name, dtype, data):
    case = CASES[name]
    arguments = data.draw(problems(case.kind, dtype))
    check(case, case.run(*arguments), *arguments)


@by_case
def test_the_matrix_of_the_contract(name, dtype):
    case = CASES[name]
    for stacks in table(case.kind, dtype):
        for result, *arguments in zip(case.run(*stacks), *stacks, strict=True):
            check(case, result, *arguments)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("name", [n for n, c in CHECKED.items() if c.excess is ITERATIVE])
def test_in_the_ball_when_steps_run_out(name, dtype, steps):
    case = CHECKED[name]
    for stacks in table(case.kind, dtype):
        p = case.run(*stacks, steps=steps)
        assert torch.isfinite(p).all()
        assert operator_norms(p).max() <= 1 + case.excess[dtype]
        if case.kind == "polar":  # P is a contraction of the true factor, never its reflection
            x = stacks[0] / stacks[0].abs().amax((-2, -1), keepdim=True).clamp_min(smallest(dtype))
            turned = symmetrized((p @ x.mT).double())
            assert torch.linalg.eigvalsh(turned).min() >= -20 * sum(p.shape[-2:]) * eps(dtype)


# --- what changes with the input ------------------------------------------------------------------


def moderate(shape, seed, dtype=F64):
    """S and Λ with entries that no power of two makes subnormal."""
    s = normal(*shape, seed=seed, dtype=dtype)
    s = torch.where(s.abs() < 0.01, 0.5, s)
    a = gram(normal(shape[0], shape[0] + 2, seed=seed + 1)) + torch.eye(shape[0], dtype=F64)
    return s, torch.where(a.abs() < 0.01, 0.0, a).to(work_dtype(dtype))


@checked
@few
@given(shape=shapes, dtype=st.sampled_from(FULL), place=st.floats(0, 1), seed=seeds)
def test_powers_of_two_change_no_bit(name, shape, dtype, place, seed):
    """(2^k S, 4^k Λ) has the same factor, 4^k A the root times 2^-k."""
    case, info = CHECKED[name], torch.finfo(dtype)
    arguments = case.of(*moderate(shape, seed, dtype))
    low, high = math.log2(info.tiny) + 12, math.log2(info.max) - 12
    k = round(low + place * (high - low)) // (1 if case.kind == "polar" else 2)
    powers = {"polar": (k,), "augmented": (k, 2 * k), "root": (2 * k,)}[case.kind]
    scaled = case.run(*map(times_power_of_two, arguments, powers))
    back = times_power_of_two(scaled, k) if case.kind == "root" else scaled
    assert torch.equal(back, case.run(*arguments))


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("dtype", FULL)
def test_the_ends_of_the_range_change_no_bit(name, dtype):
    """Scales at which ‖S‖_F and its inverse are numbers or not; but for float16 inside."""
    case, signs = FIXED[name], torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, 1]])
    rest = (torch.zeros(3, 3, dtype=dtype),) if case.kind == "augmented" else ()
    s = signs.to(dtype)
    expected = case.run(s, *rest)
    assert expected.any()
    for power in ends(dtype):
        result = case.run(times_power_of_two(s, power), *rest)
        if "half" not in name:
            assert torch.equal(result, expected)


@checked
@few
@given(shape=shapes, seed=seeds)
def test_rotations_and_signs_move_the_result_along(name, shape, seed):
    """f(QSR, QΛQᵀ) = Q f(S, Λ) R, f(−S, Λ) = −f(S, Λ), polar(Sᵀ) = polar(S)ᵀ."""
    case, (m, n) = CHECKED[name], shape
    s = with_singular_values(shape, geometric(min(shape), 2.0), seed)
    a = with_eigenvalues(geometric(m, 2.0), seed + 2)
    q, r = orthogonal(m, m, seed + 3), orthogonal(n, n, seed + 4)
    turned = symmetrized(q @ a @ q.mT)
    # Condition numbers of 1e4 at most, of the Gram matrices, times what a product rounds.
    bound = 2 * (eps(F64) ** 0.75 + 100 * (m + n) * eps(F64) * 1e4)
    if case.kind == "root":
        z = case.run(a)
        assert operator_norms(case.run(turned) - q @ z @ q.mT) <= bound * operator_norms(z)
        assert operator_norms(z @ a - a @ z) <= bound * operator_norms(z)
        return
    arguments, rotated = case.of(s, a), case.of(q @ s @ r, turned)
    p = case.run(*arguments)
    assert operator_norms(case.run(*rotated) - q @ p @ r) <= bound
    assert operator_norms(case.run(-s, *arguments[1:]) + p) <= bound
    if case.kind == "polar":
        assert operator_norms(case.run(s.mT) - p.mT) <= bound


@checked
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5)])
def test_a_stack_is_its_matrices(name, shape):
    """At unlike scales, beside zero and ill-conditioned ones, strided or not; Λ may be shared."""
    case, m = CHECKED[name], shape[0]
    scale = torch.logspace(-100, 100, 6, dtype=F64).reshape(2, 3, 1, 1)
    s, a = normal(2, 3, *shape) * scale, gram(normal(2, 3, m, m + 2, seed=1)) * scale.square()
    s[0, 1] = a[1, 1] = 0
    if case.kind == "augmented":  # whose reference takes another route for it
        s[0, 2], a[0, 2] = normal(*shape, seed=9), with_eigenvalues(geometric(m, 12.0))
    arguments = case.of(s, a)
    result = case.run(*arguments)
    # Smoothed by 0 a tall S is deficient: its rounding, eps·‖S‖, meets up to eps^(-½).
    noise = 100 * math.sqrt(eps(F64)) if case.kind == "augmented" else 1e-9
    for i, j in product(range(2), range(3)):
        alone = case.run(*(x[i, j] for x in arguments))
        torch.testing.assert_close(result[i, j], alone, rtol=1e-7, atol=noise)
    strided = case.run(*(x.mT.contiguous().mT for x in arguments))
    torch.testing.assert_close(strided, result, rtol=1e-7, atol=noise)
    if case.kind == "augmented":
        shared = case.run(s, a[:, :1])
        assert torch.equal(shared, case.run(s, a[:, :1].expand_as(a)))


@checked
def test_empty_and_zero_matrices_and_an_input_that_stays(name):
    case = CHECKED[name]
    for shape in EMPTY:
        s = torch.zeros(shape)
        eye = torch.eye(shape[-2]).expand(*shape[:-2], shape[-2], shape[-2])
        arguments = case.of(s, eye)
        assert case.run(*arguments).shape == arguments[0].shape
    for dtype in FULL + HALF * (case.kind != "root"):
        zero, one = torch.zeros(3, 3), torch.eye(3)
        s, rest = torch.stack([zero, one, zero]), torch.stack([zero, zero, one])
        arguments = (s.to(dtype), rest.to(work_dtype(dtype)))[
            : 2 if case.kind == "augmented" else 1
        ]
        before = [x.clone() for x in arguments]
        result = case.run(*arguments)
        assert not result[0].any() and not result[2].any()
        # A floor of 32·√3·eps on a unit eigenvalue costs half of it.
        assert operator_norms(result[1] - arguments[0][1]) <= 32 * eps(dtype)
        assert all(map(torch.equal, arguments, before))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", [n for n, c in CHECKED.items() if c.kind != "root"])
def test_half_precision_is_float32_rounded_once(name, dtype):
    case = CHECKED[name]
    for shape in ((1, 4), (4, 4), (4, 7), (7, 4)):
        s, *rest = case.of(*moderate(shape, 1, dtype))
        result, wide = case.run(s, *rest), case.run(s.float(), *rest)
        assert result.dtype == dtype
        # References work in float64 for both: they differ where one rounding tips the other.
        torch.testing.assert_close(result.float(), wide, rtol=eps(dtype) / 2 * 1.001, atol=1e-7)
        assert case.excess is REFERENCE or torch.equal(result, wide.to(dtype))


@pytest.mark.parametrize("name", FIXED)
def test_fixed_steps_never_look_at_values(name):
    case = FIXED[name]
    arguments = case.of(*moderate((4, 5), 0))
    with FakeTensorMode() as mode:  # refuses every data-dependent value
        p = case.run(*map(mode.from_tensor, arguments))
        assert p.shape == (4, 5)
        with pytest.raises(Exception, match="local_scalar"):
            bool(p.sum() > 0)  # the guard itself works


REFERENCES = [name for name in CHECKED if name.endswith((" svd", " eigh"))]
few_singular_values = torch.tensor([1, 1e-2, 1e-4, 1e-6], dtype=F64)


@pytest.mark.parametrize("name", REFERENCES)
def test_rank_tolerance_cuts_the_reference(name):
    case, zero = CHECKED[name], torch.zeros(4, 4, dtype=F64)
    s, a = with_singular_values((4, 6), few_singular_values), with_eigenvalues(few_singular_values)
    arguments = (a,) if case.kind == "root" else case.of(s, zero)
    for tolerance, rank in ((0.0, 4), (1e-7, 4), (1e-5, 3), (1e-3, 2), (0.5, 1)):
        result = case.run(*arguments, rank_tolerance=tolerance)
        assert torch.linalg.matrix_rank(result, atol=1e-6) == rank
    if case.kind == "augmented":  # the smoothing counts: nothing is cut once it fills the space
        ridge = case.run(s, 1e-2 * torch.eye(4, dtype=F64), rank_tolerance=1e-3)
        assert torch.linalg.matrix_rank(ridge, atol=1e-8) == 4


@pytest.mark.parametrize("dtype", FULL)
def test_a_root_cuts_the_rounding_of_its_dtype_and_nothing_else(dtype):
    unit = 2 * eps(dtype)  # √m·eps for m = 4
    root = inverse_sqrt(torch.diag(torch.tensor([1, 0.5 * unit, 0, 2 * unit], dtype=dtype)))
    expected = torch.tensor([1, 0, 0, (2 * unit) ** -0.5], dtype=dtype)
    torch.testing.assert_close(root.diagonal(), expected, rtol=eps(dtype), atol=0)


@settings(max_examples=40)
@given(dtype=st.sampled_from(FULL), data=st.data(), seed=seeds)
def test_a_deficient_matrix_gives_the_pseudo_inverse_root(dtype, data, seed):
    m = data.draw(st.sampled_from([1, 2, 5, 17]))
    values = geometric(m, 2.0, data.draw(st.integers(0, m)))
    q = orthogonal(m, m, seed)
    expected = (q * torch.where(values > 0, values, math.inf).rsqrt()) @ q.mT
    # ‖A^(-1/2)‖ ≤ 10 and eigenvectors turn by eps·‖A‖/gap, gap ≥ 1e-2, when A is rounded.
    tolerance = 10 * (m * eps(dtype) / 1e-2 + eps(dtype))
    root = inverse_sqrt(with_eigenvalues(values, seed).to(dtype))
    assert operator_norms(root - expected) <= tolerance


@pytest.mark.parametrize("dtype", FULL)
def test_default_steps_of_the_root_carry_the_floor_to_one_and_no_fewer_would(dtype):
    steps, x = coupled_steps(dtype), math.sqrt(floor(dtype))
    for i in range(steps):
        assert 1 - x > eps(dtype), f"{i} steps would do"
        x = 1.5 * x - 0.5 * x**3
    assert 1 - x <= eps(dtype)


@pytest.mark.parametrize("power", [-148, -100, -60, 0, 60, 120])
def test_the_coupled_root_at_any_scale(power):
    """Unchecked, and not rescaled by its caller: ‖A‖_F² is no float32 from 2^±64 on."""
    a = torch.diag(torch.full((4,), 2.0**power, dtype=F64)).float()
    result = coupled_inverse_sqrt(a, coupled_steps(torch.float32))
    expected = torch.eye(4, dtype=F64) * 2.0 ** (-power / 2)
    torch.testing.assert_close(result.double(), expected, rtol=64 * eps(torch.float32), atol=0)


@pytest.mark.parametrize("name", ["quintics", "cubics"])
@pytest.mark.parametrize("dtype", HALF)
def test_polynomials_stay_in_half_precision(name, dtype):
    s = normal(3, 16, 8, dtype=dtype)
    p, exact = FIXED[name].run(s), FIXED[name].run(s.double())
    assert p.dtype == dtype
    # Twice the 19 rounding units that were the worst of 200 seeds (Polar Express and Muon).
    assert operator_norms(p - exact).max() <= 38 * eps(dtype)


# --- bad input ------------------------------------------------------------------------------------

S, EYE = torch.ones(2, 3), torch.eye(2)
BAD = {
    "s": [([[1.0]], TypeError, "must be a torch.Tensor"), (S * math.nan, ValueError, "finite")],
    "a": [
        (EYE.half(), TypeError, "must be dense with a dtype among"),
        (S, ValueError, "must be square"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), ValueError, "must be symmetric"),
        (torch.tensor([[1.0, 2.0], [2.0, 1.0]]), ValueError, "must be positive semidefinite"),
    ],
    "smoothing": [
        (torch.eye(3), ValueError, r"2×2 to act on the rows.* s @ s\.mT, or transpose s"),
        (EYE.double(), TypeError, "has dtype torch.float64"),
        (-EYE, ValueError, "must be positive semidefinite"),
    ],
}
"""Values of an argument; `tests/test_checks.py` has all that the checks refuse."""


@checked
def test_bad_matrices_are_refused_by_name(name):
    case = CHECKED[name]
    names = {"polar": ("s",), "augmented": ("s", "smoothing"), "root": ("a",)}[case.kind]
    good = case.of(S, EYE)
    for i, argument in enumerate(names):
        for value, error, words in BAD[argument]:
            with pytest.raises(error, match=f"{argument} .*{words}"):
                case.run(*good[:i], value, *good[i + 1 :])


@pytest.mark.parametrize(
    ("function", "arguments"), [(polar, (S,)), (augmented_polar, (S, EYE)), (inverse_sqrt, (EYE,))]
)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "cubic"}, ValueError, "method must be one of"),
        ({"method": "newton-schulz", "steps": -1}, ValueError, "steps must be an integer ≥ 1"),
        ({"method": "newton-schulz", "steps": 0}, ValueError, "steps must be an integer ≥ 1"),
        ({"method": "newton-schulz", "steps": 2.5}, TypeError, "steps must be an integer"),
        ({"steps": 3}, ValueError, "steps does not apply to method=.*pass method='newton-schulz'"),
        ({"rank_tolerance": -1.0}, ValueError, "rank_tolerance must lie in"),
        ({"rank_tolerance": 1.0}, ValueError, "rank_tolerance must lie in"),
        ({"method": "newton-schulz", "rank_tolerance": 0.0}, ValueError, "rank_tolerance"),
        ({"method": "newton-schulz", "rank_tolerance": 1e-9}, ValueError, "rank_tolerance"),
    ],
)
def test_bad_options_are_refused_by_name(function, arguments, options, error, words):
    with pytest.raises(error, match=words):
        function(*arguments, **options)


def test_the_iterated_root_takes_no_rank_tolerance():
    with pytest.raises(ValueError, match=r"rank_tolerance does not apply .* method='eigh'"):
        inverse_sqrt(EYE, "newton-schulz", rank_tolerance=0.1)
