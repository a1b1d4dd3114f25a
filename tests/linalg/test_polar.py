import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nucleon.linalg.coefficients import contracted, muon, newton_schulz, polar_express
from nucleon.linalg.polar import (
    METHODS,
    polar,
    polar_polynomial,
    polar_qdwh,
    polar_scaled_newton,
    polar_svd,
)

ITERATIVE = METHODS[1:]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FULL = DTYPES[:2]
SHAPES = ((1, 1), (1, 7), (6, 1), (5, 5), (4, 9), (12, 3), (17, 17))

# What is promised of the operator norm, for the reference and for the iterations.
EXCESS = {
    "svd": {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2},
    None: {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2},
}

methods = st.sampled_from(METHODS)
iterative = st.sampled_from(ITERATIVE)
shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**31)
examples = settings(deadline=None, max_examples=60)


def orthogonal(m, k, generator):
    return torch.linalg.qr(torch.randn(m, k, dtype=torch.float64, generator=generator)).Q


def with_spectrum(shape, sigma, seed=0):
    """U Σ Vᵀ in float64, and its exact polar factor over the nonzero σ."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.as_tensor(sigma, dtype=torch.float64)
    u = orthogonal(shape[0], len(sigma), generator)
    v = orthogonal(shape[1], len(sigma), generator)
    return (u * sigma) @ v.mT, (u * (sigma > 0)) @ v.mT


def spectrum(shape, log_cond, rank=None):
    sigma = torch.logspace(0, -log_cond, min(shape), dtype=torch.float64)
    sigma[min(shape) if rank is None else rank :] = 0
    return sigma


def operator_norm(x):
    return torch.linalg.matrix_norm(x.double(), 2).max().item() if x.numel() else 0.0


def eps(dtype):
    return torch.finfo(dtype).eps


def working_eps(dtype):
    """Half precision is computed in float32."""
    return eps(torch.float64 if dtype is torch.float64 else torch.float32)


def rounding(s, sigma_min):
    """What float errors can turn: ‖ΔP‖_F ≤ ‖ΔS‖_F/σ_min (Li), with a backward error ΔS of at most
    √(m+n) units a product and a hundred products, the longest of the iterations."""
    backward = 100 * math.sqrt(sum(s.shape[-2:])) * working_eps(s.dtype)
    return backward * torch.linalg.matrix_norm(s.double()).item() / sigma_min


@pytest.mark.parametrize("log_cond", [0, 2, 4])
def test_reference_errs_by_the_last_rounding_only(log_cond):
    """In float32 at any condition number: ‖ΔP‖_F ≤ eps/2·‖P‖_F, as if the SVD were exact."""
    s = with_spectrum((96, 128), spectrum((96, 128), log_cond))[0].float()
    u, _, vh = torch.linalg.svd(s.double(), full_matrices=False)
    error = torch.linalg.matrix_norm(polar(s).double() - u @ vh)
    assert error <= eps(torch.float32) / 2 * math.sqrt(96) * (1 + 1e-6)


@pytest.mark.parametrize("method", METHODS)
@examples
@given(shape=shapes, dtype=st.sampled_from(FULL), data=st.data(), seed=seeds)
def test_rank_deficient_is_the_partial_isometry(method, shape, dtype, data, seed):
    rank = data.draw(st.integers(0, min(shape)))
    s, expected = with_spectrum(shape, spectrum(shape, 1.0, rank), seed)
    s = s.to(dtype)
    # Rounding noise of ten units of ‖S‖_F grows by κ√min(m, n)/rank_tolerance, κ ≤ 20.
    noise = 20 * math.sqrt(min(shape)) * 10 * eps(dtype) ** 0.5 if method != "svd" else 0.0
    bound = noise + eps(dtype) ** 0.75 + rounding(s, 0.1)
    assert operator_norm(polar(s, method) - expected) <= bound


@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", FULL)
def test_feasible_when_steps_run_out(method, steps, dtype):
    sigmas = [[1] * 12, [1] + [1e-7] * 11, torch.logspace(0, -3, 12), torch.linspace(1, 0, 12)]
    s = torch.stack([with_spectrum((12, 15), sigma)[0] for sigma in sigmas]).to(dtype)
    p = polar(s, method, steps=steps)
    assert operator_norm(p) <= 1 + EXCESS[None][dtype]
    # Every direction keeps its sign: P is a contraction of the true factor, never its reflection.
    assert torch.linalg.eigvalsh((p @ s.mT).double()).min() >= -20 * eps(dtype)


@pytest.mark.parametrize("method", METHODS)
@examples
@given(shape=shapes, dtype=st.sampled_from(DTYPES), shift=st.floats(0, 1), seed=seeds)
def test_powers_of_two_change_no_bit(method, shape, dtype, shift, seed):
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    s = torch.where(s.abs() < 0.01, 0.5, s)  # so that no entry becomes subnormal
    low, high = math.log2(torch.finfo(dtype).tiny) + 8, math.log2(torch.finfo(dtype).max) - 8
    k = round(low + shift * (high - low))
    scaled = (s.double() * 2.0**k).to(dtype)
    assert torch.equal(polar(scaled, method), polar(s, method))


@pytest.mark.parametrize("method", METHODS)
@examples
@given(shape=shapes, seed=seeds)
def test_orthogonal_equivariance_and_transposition(method, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    s, _ = with_spectrum(shape, spectrum(shape, 2.0), seed)
    left, right = (
        orthogonal(shape[0], shape[0], generator),
        orthogonal(shape[1], shape[1], generator),
    )
    p = polar(s, method)
    bound = 2 * (eps(s.dtype) ** 0.75 + rounding(s, 1e-2))
    assert operator_norm(polar(left @ s @ right, method) - left @ p @ right) <= bound
    assert operator_norm(polar(s.mT, method) - p.mT) <= bound
    assert operator_norm(polar(-s, method) + p) <= bound


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_gives_zero_within_a_stack(method, dtype):
    s = torch.stack([torch.zeros(3, 5), torch.eye(3, 5), torch.zeros(3, 5)]).to(dtype)
    p, convergence = polar(s, method, report=True)
    assert torch.equal(p[0], torch.zeros(3, 5, dtype=dtype))
    assert torch.equal(p[2], torch.zeros(3, 5, dtype=dtype))
    assert operator_norm(p[1] - s[1]) <= 2 * eps(dtype)
    assert convergence.converged.all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (2, 0, 4), (2, 4, 0), (0, 0), (0, 5), (5, 0), (3, 0, 2, 2)]
)
def test_empty(method, shape):
    p, convergence = polar(torch.zeros(shape), method, report=True)
    assert p.shape == shape
    assert convergence.residual.shape == shape[:-2]
    assert convergence.converged.all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 6, 4)])
def test_stacks_equal_single_matrices(method, shape):
    s = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s *= torch.logspace(-200, 200, 6, dtype=torch.float64).reshape(2, 3, 1, 1)
    p, convergence = polar(s, method, report=True)
    assert convergence.residual.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            single, alone = polar(s[i, j], method, report=True)
            torch.testing.assert_close(p[i, j], single, rtol=0, atol=1e-12)
            assert convergence.steps == alone.steps
    strided = polar(s.mT.contiguous().mT, method)
    torch.testing.assert_close(strided, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ITERATIVE)
@examples
@given(
    shape=shapes,
    log_rank=st.floats(-6, -1),
    log_tolerance=st.floats(-9, -1),
    position=st.floats(0, 1),
    seed=seeds,
)
def test_tolerance_is_met_above_the_rank_tolerance(
    method, shape, log_rank, log_tolerance, position, seed
):
    """Any σ in [rank_tolerance·σ_max, σ_max] ends in [1 − tolerance, 1]."""
    rank_tolerance, tolerance = 10.0**log_rank, 10.0**log_tolerance
    sigma = torch.ones(min(shape), dtype=torch.float64)
    sigma[1:] = rank_tolerance ** (position * torch.arange(1, min(shape)) / max(1, min(shape) - 1))
    s, expected = with_spectrum(shape, sigma, seed)
    p, convergence = polar(
        s, method, tolerance=tolerance, rank_tolerance=rank_tolerance * (1 - 1e-6), report=True
    )
    values = torch.linalg.svdvals(p)
    slack = 1e-12  # the scalar recursion in float64
    assert values.min() >= 1 - tolerance - slack
    assert values.max() <= 1 + slack
    assert operator_norm(p - expected) <= tolerance + rounding(s, sigma.min().item())
    assert (convergence.residual <= tolerance + slack).all()


@pytest.mark.parametrize("method", METHODS)
def test_report_is_the_distance_from_one(method):
    """Against the singular values themselves: here all σ are above the rank tolerance."""
    s, _ = with_spectrum((9, 14), spectrum((9, 14), 3.0))
    options = {} if method == "svd" else {"steps": 2}
    p, convergence = polar(s, method, report=True, **options)
    expected = (1 - torch.linalg.svdvals(p)).abs().max()
    torch.testing.assert_close(convergence.residual, expected, rtol=0, atol=1e-14)
    assert convergence.residual.dtype == torch.float64
    assert convergence.steps == options.get("steps", 0)
    assert convergence.tolerance == pytest.approx(eps(s.dtype) ** 0.75)


@pytest.mark.parametrize("method", ITERATIVE)
@pytest.mark.parametrize("dtype", FULL)
def test_report_sees_a_small_direction_that_did_not_arrive(method, dtype):
    """σ in {1, 1e-3}: the large ones arrive at once, the small one does not in two steps."""
    s = with_spectrum((6, 8), [1, 1, 1, 1, 1, 1e-3])[0].to(dtype)
    few = polar(s, method, steps=2, report=True)[1]
    assert not few.converged
    assert few.residual > 0.05
    enough = polar(s, method, report=True)[1]
    assert enough.converged
    # Below the rank tolerance that direction is nobody's concern.
    assert polar(s, method, rank_tolerance=0.1, report=True)[1].converged


def test_report_ignores_rank_noise():
    s, _ = with_spectrum((6, 8), [1, 0.5, 0.25, 0, 0, 0])
    for method in METHODS:
        assert polar(s.float(), method, report=True)[1].converged


@pytest.mark.parametrize(
    ("method", "least", "most"),
    [("newton-schulz", 4, 9), ("polar-express", 3, 8), ("scaled-newton", 10, 15), ("qdwh", 4, 20)],
)
@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("size", [2, 16, 128])
def test_growth_far_below_the_rank_tolerance(method, least, most, dtype, size):
    """A tiny σ ends at κ√min(m, n)·σ/(rank_tolerance‖S‖_F), with the κ of the docstring ± ½."""
    diagonal = torch.ones(size, dtype=dtype)
    diagonal[-1] = tiny = eps(dtype) / 4
    p = polar(torch.diag(diagonal), method)
    kappa = p[-1, -1].item() * eps(dtype) ** 0.5 * (size - 1) ** 0.5 / (tiny * size**0.5)
    assert least - 0.5 <= kappa <= most + 0.5


def test_rank_tolerance_cuts_the_svd():
    s, _ = with_spectrum((5, 7), [1, 0.5, 1e-2, 1e-4, 1e-6])
    for rank_tolerance, rank in ((1e-7, 5), (1e-5, 4), (1e-3, 3), (0.1, 2), (0.7, 1)):
        assert torch.linalg.matrix_rank(polar(s, rank_tolerance=rank_tolerance)) == rank


@pytest.mark.parametrize("dtype", FULL)
def test_smallest_rank_tolerance_is_safe(dtype):
    """At rank_tolerance = eps noise is signal: nothing is promised of it but feasibility."""
    ones = torch.ones(6, 9, dtype=dtype)
    s = torch.stack([ones, with_spectrum((6, 9), spectrum((6, 9), 3.0, 4))[0].to(dtype)])
    for method in METHODS:
        p = polar(s, method, rank_tolerance=eps(dtype), tolerance=eps(dtype))
        assert torch.isfinite(p).all()
        assert operator_norm(p) <= 1 + EXCESS["svd" if method == "svd" else None][dtype]


def test_input_is_not_changed():
    s = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    copy = s.clone()
    for method in METHODS:
        polar(s, method, report=True)
    assert torch.equal(s, copy)


class NoSynchronization(TorchDispatchMode):
    """Refuses the operations that move a value to the host."""

    FORBIDDEN = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.FORBIDDEN:
            raise AssertionError(f"{func} synchronizes with the host")
        return func(*args, **(kwargs or {}))


UNCHECKED = {
    "newton-schulz": lambda s: polar_polynomial(s, [newton_schulz()] * 8),
    "polar-express": lambda s: polar_polynomial(s, polar_express(1e-3, 6)),
    "muon": lambda s: polar_polynomial(s, [muon()] * 5),
    "scaled-newton": lambda s: polar_scaled_newton(s, 6),
    "qdwh": lambda s: polar_qdwh(s, 5),
    "svd": polar_svd,
}


@pytest.mark.parametrize("name", UNCHECKED)
@pytest.mark.parametrize("dtype", FULL)
def test_unchecked_functions_do_not_look_at_values(name, dtype):
    s = torch.randn(2, 3, 5, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    with NoSynchronization():
        p = UNCHECKED[name](s)
        with pytest.raises(AssertionError, match="synchronizes"):
            bool(p.sum() > 0)  # the guard itself works
    assert p.dtype == dtype
    assert p.shape == s.shape


@pytest.mark.parametrize("name", ["newton-schulz", "polar-express", "muon"])
@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_polynomials_stay_in_half_precision(name, dtype):
    s = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    p = UNCHECKED[name](s)
    assert p.dtype == dtype
    exact = UNCHECKED[name](s.double())
    # Twice the 19 rounding units that were the worst of 200 seeds (Polar Express and Muon).
    assert operator_norm(p - exact) <= 38 * eps(dtype)


def test_unchecked_defaults_are_those_of_polar():
    s, _ = with_spectrum((6, 9), spectrum((6, 9), 3.0, 5))
    for method, function in (("scaled-newton", polar_scaled_newton), ("qdwh", polar_qdwh)):
        p, convergence = polar(s, method, report=True)
        assert torch.equal(function(s, convergence.steps), p)
    assert torch.equal(polar_svd(s), polar(s))
    p, convergence = polar(s, "polar-express", report=True)
    sequence = polar_express(eps(s.dtype) ** 0.5 / 6**0.5, convergence.steps)
    assert torch.equal(polar_polynomial(s, contracted(sequence)), p)


@pytest.mark.parametrize("shape", [(8, 8), (6, 12), (12, 6)])
def test_muon_polynomial_against_torch_optim_muon(shape):
    """A step of `torch.optim.Muon` with lr 1, in bfloat16, strays from our float64 factor no more
    than bfloat16 makes ours stray; one quintic step fewer or more would be seen."""
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(30, *shape, generator=generator)

    def torch_direction(gradient):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = gradient.clone()
        options = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        torch.optim.Muon([weight], adjust_lr_fn="original", **options).step()
        return -weight.detach() / max(1.0, shape[0] / shape[1]) ** 0.5

    def distance(x, y):
        return torch.linalg.matrix_norm(x.double() - y.double()).mean().item()

    theirs = torch.stack([torch_direction(gradient) for gradient in gradients])
    ours = {k: polar_polynomial(gradients.double(), [muon()] * k) for k in (4, 5, 6)}
    half = torch.stack([polar_polynomial(g.bfloat16(), [muon()] * 5) for g in gradients])
    rounding = distance(half, ours[5])
    assert distance(theirs, ours[5]) <= 2 * rounding
    assert distance(theirs, ours[4]) > 4 * rounding
    assert distance(theirs, ours[6]) > 4 * rounding


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([[1.0]], TypeError, "s must be a torch.Tensor"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "s must hold floating-point"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "s must be real"),
        (torch.eye(2).to_sparse(), TypeError, "s must be dense"),
        (torch.ones(3), ValueError, "s must have at least two dimensions"),
        (torch.full((2, 2), math.nan), ValueError, "s must be finite"),
        (torch.full((2, 2), math.inf), ValueError, "s must be finite"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_bad_matrix(value, error, words, method):
    with pytest.raises(error, match=words):
        polar(value, method)


@pytest.mark.parametrize(
    ("method", "options", "error", "words"),
    [
        ("cubic", {}, ValueError, "method must be one of 'svd', 'newton-schulz'"),
        ("qdwh", {"steps": -1}, ValueError, "steps must be an integer ≥ 1, got -1"),
        ("qdwh", {"steps": 0}, ValueError, "steps must be an integer ≥ 1, got 0"),
        ("qdwh", {"steps": 2.5}, TypeError, "steps must be an integer"),
        ("qdwh", {"steps": 3, "tolerance": 1e-3}, ValueError, "steps or tolerance, not both"),
        ("svd", {"steps": 3}, ValueError, "steps does not apply"),
        ("qdwh", {"tolerance": 0.0}, ValueError, "tolerance must lie in"),
        ("qdwh", {"tolerance": 1.5}, ValueError, "tolerance must lie in"),
        ("qdwh", {"tolerance": 1e-12}, ValueError, "tolerance must be ≥ the rounding unit"),
        ("qdwh", {"tolerance": "small"}, TypeError, "tolerance must be a number"),
        ("svd", {"rank_tolerance": -1.0}, ValueError, "rank_tolerance must lie in"),
        ("qdwh", {"rank_tolerance": 1e-9}, ValueError, "rank_tolerance must be ≥ the rounding"),
    ],
)
def test_bad_options(method, options, error, words):
    with pytest.raises(error, match=words):
        polar(torch.eye(2), method, **options)
