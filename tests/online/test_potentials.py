"""The four potentials against the oracle, autograd and closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nucleon import noise
from nucleon.claims.oracle import algebra, bounds, smoothings
from nucleon.claims.oracle.algebra import Array
from nucleon.linalg.roots import cholesky_root
from nucleon.online.potentials import (
    Admissibility,
    Gaussian,
    Hyperbolic,
    Nuclear,
    Potential,
    Regularized,
)

F64 = torch.float64
EPS = torch.finfo(F64).eps
TIGHT = Regularized(tolerance=1e-13, max_iterations=20_000)
PAIRS = Gaussian(samples=4, antithetic=True, seed=3)
POTENTIALS: list[Potential] = [Nuclear(), TIGHT, PAIRS, Hyperbolic()]
SHAPES = [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 2), (2, 3, 4), (2, 1, 3, 2)]
BY_NAME = {"ids": lambda value: type(value).__name__}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed)).Q


def spd(
    *batch_and_size: int,
    seed: int = 1,
    low: float = 0.5,
    high: float = 4.0,
    dtype: torch.dtype = F64,
) -> Tensor:
    """A symmetric matrix with eigenvalues between `low` and `high`, geometrically spaced."""
    *batch, size = batch_and_size
    q = torch.linalg.qr(normal(*batch, size, size, seed=seed)).Q
    values = torch.logspace(math.log10(low), math.log10(high), size, dtype=F64)
    a = (q * values) @ q.mT
    return ((a + a.mT) / 2).to(dtype)


def smoothing_for(s: Tensor, seed: int = 1) -> Tensor:
    return spd(*s.shape[:-1], seed=seed)


def sqrtm(a: Tensor, power: float = 0.5) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp_min(0).pow(power).unsqueeze(-2)) @ vectors.mT


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.double())


def rounding(potential: Potential, s: Tensor, value: Tensor) -> Tensor:
    """Return the error of an SVD in the dtype of `s` for a sum of singular values, and the gap."""
    eps = torch.finfo(s.dtype).eps * 10 * (s.shape[-1] + s.shape[-2])
    gap = potential.tolerance if isinstance(potential, Regularized) else 0.0
    return (eps + gap) * value.double().abs()


# --- values and gradients ---------------------------------------------------------------------


def value_and_slope(potential: Potential, s: Tensor, smoothing: Tensor) -> tuple[Array, Array]:
    """Ψ and ∇Ψ of one matrix by the oracle, with the noise of the class."""
    total, root = s.numpy(), np.linalg.cholesky(smoothing.numpy())
    if isinstance(potential, Nuclear):
        return algebra.nuclear(total), algebra.polar(total)
    if isinstance(potential, Hyperbolic):
        psi = smoothings.hyperbolic()
    elif isinstance(potential, Regularized):
        psi, root = smoothings.regularized(), algebra.power(smoothing.numpy(), 0.5)
    else:
        assert isinstance(potential, Gaussian)
        draws = potential.samples // (2 if potential.antithetic else 1)
        shape = (s.shape[0], potential.padded_width(*s.shape))
        known = {"seed": potential.seed, "stream": 0, "step": 0, "dtype": F64}
        z = np.stack([noise.normal(shape, sample=i, **known).numpy() for i in range(draws)])
        psi = smoothings.gaussian(np.concatenate([z, -z]) if potential.antithetic else z)
    return psi.value(total, root).mean(0), psi.slope(total, root).mean(0)


@pytest.mark.parametrize("potential", [Nuclear(), TIGHT, Hyperbolic()], **BY_NAME)
def test_value_at_a_root_is_that_of_its_square(potential: Potential) -> None:
    s, root = normal(2, 3, 5), spd(2, 3, seed=4)
    expected = potential.value(s, root @ root)
    # The square has the condition 64, and TIGHT a gap of 1e-13. Gaussian's are equal in law alone.
    for value in potential.value_at_root(s, root), Potential.value_at_root(potential, s, root):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5), (5, 2)])
@pytest.mark.parametrize(
    "potential",
    [*POTENTIALS, Gaussian(samples=3), replace(TIGHT, solver="projected-gradient")],
    **BY_NAME,
)
def test_value_and_gradient_are_the_oracle_s(potential: Potential, shape: tuple[int, int]) -> None:
    s = normal(*shape)
    smoothing = smoothing_for(s)
    value, slope = map(torch.as_tensor, value_and_slope(potential, s, smoothing))
    # The condition numbers here are below 1e4; the jitter of Cholesky adds 8m·eps to Λ. A gap of
    # 1e-13 moves a maximizer by its root.
    atol = 5e-6 if isinstance(potential, Regularized) else 1e-10
    torch.testing.assert_close(potential.value(s, smoothing), value, rtol=1e-11, atol=0)
    torch.testing.assert_close(potential.gradient(s, smoothing), slope, rtol=0, atol=atol)
    s.requires_grad_()
    potential.value(s, smoothing).backward()
    torch.testing.assert_close(s.grad, slope, rtol=0, atol=atol)


def test_regularized_reports_its_gap_and_starts_warm() -> None:
    s = 3 * normal(4, 6)
    smoothing = spd(4, low=1e-3)
    potential = Regularized(tolerance=1e-9)
    cold = potential.solve(s, smoothing)
    warm = potential.solve(s, smoothing, start=cold.x)
    assert cold.converged and cold.relative_gap <= 1e-9 and cold.iterations > warm.iterations
    root = sqrtm(smoothing)
    value = -cold.value + root.trace() / 2
    torch.testing.assert_close(potential.value(s, smoothing), value, rtol=1e-13, atol=0)
    exact = TIGHT.value(s, smoothing)
    assert 0 <= exact - value + 1e-13 * exact <= cold.gap + 2e-13 * exact
    short = replace(potential, max_iterations=1).solve(s, smoothing)
    assert not short.converged and short.gap > cold.gap


# --- the properties of Definition 3.1 that need no search ---------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(S, Λ) of any rank, condition number and scale, in float32 or float64."""
    dtype = draw(st.sampled_from([torch.float32, F64]))
    m, n = draw(st.sampled_from([(1, 1), (1, 5), (5, 1), (3, 3), (2, 6), (6, 2)]))
    batch = draw(st.sampled_from([(), (2,), (0,)]))
    limit = 12 if dtype == torch.float32 else 140
    seed = draw(st.integers(0, 2**16))

    def part(rows: int, columns: int, offset: int) -> Tensor:
        rank = draw(st.integers(0, min(rows, columns)))
        spread = 10.0 ** -draw(st.sampled_from([0, 3, 8]))
        scale = 10.0 ** draw(st.integers(-limit, limit))
        u = normal(*batch, rows, rank, seed=seed + offset)
        v = normal(*batch, rank, columns, seed=seed + offset + 1)
        return scale * (u * torch.linspace(1, spread, rank, dtype=F64)) @ v

    factor = part(m, m, 2)
    return part(m, n, 0).to(dtype), (factor @ factor.mT).to(dtype)


@pytest.mark.parametrize("potential", [Nuclear(), Regularized(), PAIRS, Hyperbolic()], **BY_NAME)
@settings(deadline=None, max_examples=25)
@given(problem=problems())
def test_feasible_and_dominant_at_any_rank_condition_and_scale(
    potential: Potential, problem: tuple[Tensor, Tensor]
) -> None:
    s, smoothing = problem
    gradient, value = potential.gradient(s, smoothing), potential.value(s, smoothing)
    assert gradient.shape == s.shape and gradient.dtype == s.dtype
    assert value.shape == s.shape[:-2] and value.dtype == s.dtype
    assert torch.isfinite(gradient).all() and torch.isfinite(value).all()
    tolerance = 1e-9 if s.dtype == F64 else 1e-5
    assert (singular_values(gradient)[..., 0] <= 1 + tolerance).all()
    # Antithetic pairs: ½‖A+B‖ + ½‖A−B‖ ≥ ‖A‖ holds for the samples, not only on average.
    slack = rounding(potential, s, value)
    assert (value.double() + slack >= singular_values(s).sum(-1)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("potential", POTENTIALS, **BY_NAME)
def test_without_smoothing_it_is_the_nuclear_norm(
    potential: Potential, shape: tuple[int, ...]
) -> None:
    s = normal(*shape)
    zero = torch.zeros(*shape[:-1], shape[-2], dtype=F64)
    value, gradient = potential.value(s, zero), potential.gradient(s, zero)
    torch.testing.assert_close(value, singular_values(s).sum(-1), rtol=1e-12, atol=0)
    u, _, vh = torch.linalg.svd(s, full_matrices=False)
    torch.testing.assert_close(gradient, u @ vh, rtol=0, atol=1e-10)


@pytest.mark.parametrize("potential", POTENTIALS, **BY_NAME)
def test_a_zero_total_has_a_zero_gradient(potential: Potential) -> None:
    zero = torch.zeros(2, 3, 4, dtype=F64)
    gradient = potential.gradient(zero, spd(2, 3))
    torch.testing.assert_close(gradient, zero, rtol=0, atol=1e-15)


@pytest.mark.parametrize("potential", POTENTIALS, **BY_NAME)
def test_homogeneous(potential: Potential) -> None:
    s, smoothing = normal(3, 4), spd(3)
    for c in (2.0**-40, 2.0**40):
        value = potential.value(c * s, c**2 * smoothing)
        torch.testing.assert_close(value, c * potential.value(s, smoothing), rtol=1e-12, atol=0)
        gradient = potential.gradient(c * s, c**2 * smoothing)
        torch.testing.assert_close(gradient, potential.gradient(s, smoothing), rtol=0, atol=2e-6)


@pytest.mark.parametrize("potential", POTENTIALS, **BY_NAME)
def test_a_batch_is_its_matrices_and_the_smoothing_broadcasts(potential: Potential) -> None:
    s, smoothing = normal(2, 3, 2, 4), spd(2)
    values, gradients = potential.value(s, smoothing), potential.gradient(s, smoothing)
    for i in range(2):
        for j in range(3):
            options = {"stream": 3 * i + j} if isinstance(potential, Gaussian) else {}
            value = potential.value(s[i, j], smoothing, **options)
            gradient = potential.gradient(s[i, j], smoothing, **options)
            torch.testing.assert_close(values[i, j], value, rtol=1e-13, atol=0)
            torch.testing.assert_close(gradients[i, j], gradient, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("potential", POTENTIALS, **BY_NAME)
def test_lower_precision_agrees_with_float64(potential: Potential, dtype: torch.dtype) -> None:
    m, n = 3, 5
    s, smoothing = normal(m, n, dtype=dtype), spd(m, dtype=torch.float32)
    value, gradient = potential.value(s, smoothing), potential.gradient(s, smoothing)
    assert value.dtype == gradient.dtype == dtype
    wide = s.double(), smoothing.double()
    # The result is rounded once to `dtype`. Before that, float32: the jitter of Cholesky changes Λ
    # by 8m·eps, hence Ψ by half of that, and the SVD adds a few eps; a gradient moves by the
    # change of S and L times 1/σ_min, here below 10.
    eps = torch.finfo(dtype).eps / 2 + (4 * m + 10) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(value.double(), potential.value(*wide), rtol=eps, atol=0)
    torch.testing.assert_close(gradient.double(), potential.gradient(*wide), rtol=0, atol=10 * eps)


# --- closed cases and limits ---------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(n=st.integers(1, 6), seed=st.integers(0, 999), length=st.floats(1e-3, 1e3))
def test_a_single_row(n: int, seed: int, length: float) -> None:
    s = normal(1, n, seed=seed)
    norm = s.norm().item()
    smoothing = torch.tensor([[length**2]], dtype=F64)
    hyperbolic = math.hypot(norm, length)
    assert Hyperbolic().value(s, smoothing).item() == pytest.approx(hyperbolic, rel=1e-13)
    found = Hyperbolic().gradient(s, smoothing)
    torch.testing.assert_close(found, s / hyperbolic, rtol=1e-12, atol=1e-14)
    # Regularized: |s|²/(2ℓ) + ℓ/2 inside (Huber's function, shifted), |s| outside.
    inside = norm <= length
    value = norm**2 / (2 * length) + length / 2 if inside else norm
    assert TIGHT.value(s, smoothing).item() == pytest.approx(value, rel=1e-12)
    # ½ℓ|x̂ − x|² ≤ gap ≤ 1e-13·|s|, hence |x̂ − x|² ≤ 2e-13·|s|/ℓ; outside, projection is exact.
    expected = s / max(norm, length)
    torch.testing.assert_close(TIGHT.gradient(s, smoothing), expected, rtol=0, atol=5e-7)


@pytest.mark.parametrize("shape", [(3, 5), (3, 3), (1, 4)])
def test_limits_of_little_and_much_smoothing(shape: tuple[int, int]) -> None:
    s = normal(*shape)
    smoothing, sigma = smoothing_for(s), singular_values(s)
    u, _, vh = torch.linalg.svd(s, full_matrices=False)
    c = 1e-10
    # aug(S, cΛ) = polar(S) up to c‖Λ‖/(2σ_min²); √c·aug(S, cΛ) = Λ^(-1/2)S up to relative
    # ‖S‖²/(2cλ_min).
    error = torch.linalg.matrix_norm(Hyperbolic().gradient(s, c * smoothing) - u @ vh, ord=2)
    assert error <= 10 * c / sigma[-1] ** 2
    unconstrained = sqrtm(smoothing, -0.5) @ s
    for potential in (Hyperbolic(), TIGHT):
        found = potential.gradient(s, smoothing / c) / math.sqrt(c)
        torch.testing.assert_close(found, unconstrained, rtol=1e-7, atol=1e-7)


def test_hyperbolic_value_keeps_the_digits_that_a_gram_matrix_loses() -> None:
    tiny = 1e-11  # its square is far below eps next to 1
    s = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=F64)
    smoothing = torch.tensor([[0.0, 0.0], [0.0, tiny**2]], dtype=F64)
    q = orthogonal(2)
    found = Hyperbolic().value(s @ q, smoothing).item()
    assert abs(found - 1 - tiny) <= 4 * EPS
    small = q @ torch.tensor([1.0, tiny], dtype=F64).diag()
    assert abs(Hyperbolic().value(small, 0 * smoothing).item() - 1 - tiny) <= 4 * EPS


# --- Gaussian ------------------------------------------------------------------------------------


def test_padded_gaussian_tends_to_hyperbolic() -> None:
    """[S 0] + LZ/√n′ has a Gram SSᵀ + Λ + O(1/√n′), of mean zero error: the bias is O(1/n′)."""
    s, smoothing = normal(2, 3), spd(2)
    limit = Hyperbolic().value(s, smoothing), Hyperbolic().gradient(s, smoothing)
    errors = []
    for width, samples in ((8, 4000), (80, 4000), (800, 4000)):
        potential = Gaussian(samples=samples, antithetic=True, width=width)
        found = potential.value(s, smoothing / width), potential.gradient(s, smoothing / width)
        errors.append(max((a - b).abs().max().item() for a, b in zip(found, limit, strict=True)))
    assert errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3
    assert errors[2] < 0.01


def test_noise_is_a_function_of_seed_stream_step_and_sample() -> None:
    s, smoothing = normal(2, 4), spd(2)
    potential = Gaussian(samples=1)
    base = potential.gradient(s, smoothing)
    assert torch.equal(base, Gaussian(samples=1).gradient(s, smoothing))
    others = [
        potential.gradient(s, smoothing, step=1),
        potential.gradient(s, smoothing, stream=1),
        replace(potential, seed=1).gradient(s, smoothing),
        replace(potential, samples=2).gradient(s, smoothing),
    ]
    assert all(not torch.equal(base, other) for other in others)
    streams = torch.tensor([5, 0])
    both = potential.gradient(torch.stack([s, s]), smoothing, stream=streams)
    assert torch.equal(both[1], base)
    assert torch.equal(both[0], potential.gradient(s, smoothing, stream=5))


def test_default_width_bounds_the_dimensional_factor() -> None:
    for m in range(1, 40):
        for n in range(1, 90):
            width = Gaussian().padded_width(m, n)
            assert width == bounds.padded(m, n)
            assert (width / (width - m - 1)) ** 0.25 <= math.sqrt(2) + 1e-15 or width == n
    assert Gaussian(width=7).padded_width(3, 5) == 7


@settings(deadline=None, max_examples=30)
@given(
    m=st.integers(1, 12),
    rank=st.integers(0, 12),
    spread=st.sampled_from([0, 6, 15]),
    dtype=st.sampled_from([torch.float32, F64]),
    seed=st.integers(0, 999),
)
def test_cholesky_root_of_singular_matrices(
    m: int, rank: int, spread: int, dtype: torch.dtype, seed: int
) -> None:
    rows = torch.logspace(0, -spread, m, dtype=F64)[:, None]  # rows of very different scale
    factor = rows * normal(m, min(rank, m), seed=seed)
    a = (factor @ factor.mT).to(dtype)
    root, failed = cholesky_root(a)
    assert not failed and torch.equal(root, root.tril())
    delta = 8 * m * torch.finfo(dtype).eps
    target = a.double() + delta * a.double().diagonal().diag()
    scale = a.double().diagonal().sqrt()
    # Cholesky's backward error: (m+1)·eps·√(aᵢᵢaⱼⱼ); the scaling adds a few eps.
    error = (m + 8) * torch.finfo(dtype).eps * scale[:, None] * scale
    assert ((root.double() @ root.double().mT - target).abs() <= error + 1e-300).all()


def test_cholesky_root_bounds_what_it_cannot_factor() -> None:
    a = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [1.0, 2.0]]], dtype=F64)
    root, failed = cholesky_root(a)
    assert failed.tolist() == [True, False]
    torch.testing.assert_close(root[0] @ root[0].mT, 2 * torch.eye(2, dtype=F64))
    torch.testing.assert_close(root[1] @ root[1].mT, a[1])


# --- constants ------------------------------------------------------------------------------------


def test_stated_constants() -> None:
    assert Nuclear().admissibility(3, 5) is None
    assert Regularized().admissibility(3, 5) == Admissibility(0.5, 1.0)
    assert Hyperbolic().admissibility(3, 5) == Admissibility(1.0, 1.0)
    assert Gaussian().admissibility(4, 9) == Admissibility(2.0 + 3.0, 0.5)
    assert Gaussian(width=9).admissibility(4, 4) == Admissibility(5.0, 0.5)
    assert Gaussian(width=4).admissibility(4, 4) is None  # the paper's own experiment
    constants = Admissibility(4.0, 0.25)
    assert constants.product == 1.0 and constants.eta == 4.0


# --- bad input ------------------------------------------------------------------------------------

S, EYE = torch.ones(2, 3), torch.eye(2)


@pytest.mark.parametrize("name", ["value", "gradient"])
@pytest.mark.parametrize("potential", POTENTIALS, **BY_NAME)
@pytest.mark.parametrize(
    ("s", "smoothing", "error", "match"),
    [
        ([[1.0]], EYE, TypeError, "s must be a torch.Tensor"),
        (torch.full((2, 3), torch.nan), EYE, ValueError, "s must be finite"),
        (S, None, TypeError, "smoothing must be a torch.Tensor"),
        (S, torch.eye(3), ValueError, "smoothing must be 2×2 to act on the rows"),
        (S, torch.tensor([[1.0, 0.5], [0.0, 1.0]]), ValueError, "smoothing must be symmetric"),
        (S, -EYE, ValueError, "positive semidefinite"),
        (S, EYE.double(), TypeError, "smoothing has dtype torch.float64 but s has torch.float32"),
        (S, EYE.expand(4, 2, 2), ValueError, "does not broadcast"),
    ],
)
def test_bad_input_is_named(
    name: str,
    potential: Potential,
    s: object,
    smoothing: object,
    error: type[Exception],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        getattr(potential, name)(s, smoothing)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: Nuclear(method="cubic"), ValueError, "method must be one of"),  # type: ignore[arg-type]
        (lambda: Hyperbolic(method="svd"), ValueError, "method must be one of"),  # type: ignore[arg-type]
        (lambda: Regularized(solver="newton"), ValueError, "solver must be one of"),  # type: ignore[arg-type]
        (lambda: Regularized(tolerance=0.0), ValueError, "tolerance must be"),
        (lambda: Regularized(max_iterations=0), ValueError, "max_iterations must be"),
        (lambda: Gaussian(samples=0), ValueError, "samples must be"),
        (lambda: Gaussian(samples=3, antithetic=True), ValueError, "come in pairs"),
        (lambda: Gaussian(width=0), ValueError, "width must be"),
        (lambda: Gaussian(method="eigh"), ValueError, "method must be one of"),  # type: ignore[arg-type]
        (lambda: Gaussian(width=2).value(S, EYE), ValueError, "width must be at least .* 3"),
    ],
)
def test_bad_options_are_named(make: object, error: type[Exception], match: str) -> None:
    assert callable(make)
    with pytest.raises(error, match=match):
        make()


def test_regularized_reaches_its_gap_on_a_singular_smoothing_at_a_small_scale() -> None:
    """Projected gradient stalls here: the total is 1e-8 of the smoothing, which has rank three."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    s = 1e-8 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    solution = Regularized().solve(s, root @ root.mT)
    assert solution.converged and solution.relative_gap <= 1e-8


def test_regularized_says_when_it_ran_out_of_iterations() -> None:
    generator = torch.Generator().manual_seed(0)
    s = 3 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    with pytest.warns(UserWarning, match="relative gap of .* above the tolerance"):
        Regularized(max_iterations=1, tolerance=1e-12).gradient(s, root @ root.mT)
