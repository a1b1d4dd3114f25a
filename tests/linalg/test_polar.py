"""Polar factors: tolerances and steps, polynomials of one's own, torch's Muon, closed cases.

`test_every_method.py` has what every method promises of every input.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg import augmented_polar, operator_norm, polar
from nucleon.linalg.coefficients import bound_for, largest, muon
from nucleon.linalg.polar import METHODS, polar_polynomial
from nucleon.optim.polar_methods import polynomials
from strategies import (
    F64,
    FULL,
    HALF,
    eps,
    geometric,
    normal,
    operator_norms,
    orthogonal,
    seeds,
    shapes,
    with_singular_values,
)

ITERATIVE = METHODS[1:]
DESIGNED = ITERATIVE[1:]


def with_factor(shape, sigma, seed=0):
    """U Σ Vᵀ in float64, and its exact polar factor over the nonzero σ."""
    u, v = orthogonal(shape[0], len(sigma), seed), orthogonal(shape[1], len(sigma), seed + 1)
    return (u * sigma) @ v.mT, (u * (sigma > 0)) @ v.mT


def rounding(s, sigma_min):
    """Rotation by float errors: ‖ΔP‖_F ≤ ‖ΔS‖_F/σ_min (Li), with a backward error ΔS of at most
    √(m+n) units a product and a hundred products, the longest of the iterations."""
    backward = 100 * math.sqrt(sum(s.shape[-2:])) * eps(s.dtype)
    return backward * torch.linalg.matrix_norm(s.double()).item() / sigma_min


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60)
@given(shape=shapes, dtype=st.sampled_from(FULL), data=st.data(), seed=seeds)
def test_a_deficient_matrix_has_the_partial_isometry(method, shape, dtype, data, seed):
    rank = data.draw(st.integers(0, min(shape)))
    s, expected = with_factor(shape, geometric(min(shape), 1.0, rank), seed)
    s = s.to(dtype)
    # Rounding noise of ten units of ‖S‖_F grows by κ√min(m, n)/rank_tolerance, κ ≤ 20.
    noise = 20 * math.sqrt(min(shape)) * 10 * eps(dtype) ** 0.5 if method != "svd" else 0.0
    bound = noise + eps(dtype) ** 0.75 + rounding(s, 0.1)
    assert operator_norms(polar(s, method) - expected) <= bound


@pytest.mark.parametrize("method", ITERATIVE)
@settings(max_examples=60)
@given(shape=shapes, log_rank=st.floats(-6, -1), position=st.floats(0, 1), seed=seeds)
def test_what_is_above_the_rank_tolerance_becomes_one(method, shape, log_rank, position, seed):
    """Any σ in [rank_tolerance·σ_max, σ_max] ends in [1 − eps^¾, 1]."""
    cut = 10.0**log_rank
    share = torch.arange(min(shape), dtype=F64) / max(1, min(shape) - 1)
    sigma = cut ** torch.where(share > 0, position * share, 0.0)
    s, expected = with_factor(shape, sigma, seed)
    p = polar(s, method, rank_tolerance=cut * (1 - 1e-6))
    values, slack = torch.linalg.svdvals(p), 1e-12  # the scalar recursion in float64
    assert 1 - eps(F64) ** 0.75 - slack <= values.min() <= values.max() <= 1 + slack
    assert operator_norms(p - expected) <= eps(F64) ** 0.75 + rounding(s, sigma.min().item())


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


@pytest.mark.parametrize("dtype", FULL)
def test_the_smallest_rank_tolerance_is_safe(dtype):
    """At rank_tolerance = eps noise is signal: nothing is promised of it but feasibility."""
    ones = torch.ones(6, 9, dtype=dtype)
    s = torch.stack([ones, with_singular_values((6, 9), geometric(6, 3.0, 4)).to(dtype)])
    for method in METHODS:
        p = polar(s, method, rank_tolerance=eps(dtype))
        assert torch.isfinite(p).all()
        assert operator_norms(p).max() <= 1 + (1e-5 if method == "svd" else 1e-3)


# --- a number of steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", DESIGNED)
@pytest.mark.parametrize("steps", range(1, 8))
@settings(max_examples=20)
@given(data=st.data(), seed=seeds)
def test_steps_alone_serve_all_that_they_can_reach(method, steps, data, seed):
    """Every σ from the least bound of so many steps on ends within 0.01 of 1."""
    reach = max(bound_for(method, steps), eps(F64) ** 0.5)
    k = data.draw(st.integers(1, max(1, min(24, int(reach**-2)))))
    least = min(1.0, reach * math.sqrt(k))  # then σ ≥ reach·‖S‖_F
    position = torch.rand(k, generator=torch.Generator().manual_seed(seed), dtype=F64)
    position[0], position[-1] = 1, 0 if k > 1 else 1
    sigma = least ** (1 - position)
    s, exact = with_factor((k, k + 3), sigma, seed)
    error = operator_norms(polar(s, method, steps=steps) - exact)
    assert error <= 0.01 + rounding(s, least)


@pytest.mark.parametrize("dtype", FULL)
@pytest.mark.parametrize("function", ["polar", "augmented"])
def test_five_steps_are_those_of_the_optimizers(function, dtype):
    """A 64 × 128 matrix of condition 5; designed for √eps its factor is off by 0.9."""
    s, exact = with_factor((64, 128), geometric(64, math.log10(5)))
    s, zero = s.to(dtype), torch.zeros(64, 64, dtype=dtype)
    run = polar if function == "polar" else partial(augmented_polar, smoothing=zero)
    run = partial(run, method="polar-express", steps=5)
    p = run(s)
    if function == "polar":
        assert operator_norms(p - exact) <= 0.01
        assert torch.equal(p, polar_polynomial(s, polynomials("polar-express", 5)))
    else:  # the recursion is not contracted to the bit
        assert operator_norms(p - exact) <= 0.011
    assert operator_norms(run(s, rank_tolerance=eps(dtype) ** 0.5) - exact) > 0.5


# --- polynomials of one's own ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (6, 12), (12, 6)])
def test_coefficients_are_the_ns_coefficients_of_torch(shape):
    """A step of `torch.optim.Muon` with lr 1, in bfloat16, strays from our float64 factor no more
    than bfloat16 makes ours stray; one quintic step fewer or more would be seen."""
    gradients, triple = normal(30, *shape, seed=1).float(), (3.0, -3.2, 1.2)

    def torch_direction(gradient):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = gradient.clone()
        options = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        optimizer = torch.optim.Muon(
            [weight], adjust_lr_fn="original", ns_coefficients=triple, **options
        )
        optimizer.step()
        return -weight.detach() / max(1.0, shape[0] / shape[1]) ** 0.5

    def distance(x, y):
        return torch.linalg.matrix_norm(x.double() - y.double()).mean().item()

    theirs = torch.stack([torch_direction(gradient) for gradient in gradients])
    ours = {k: polar(gradients.double(), coefficients=[triple], steps=k) for k in (4, 5, 6)}
    half = torch.stack([polar_polynomial(g.bfloat16(), [triple] * 5) for g in gradients])
    assert distance(theirs, ours[5]) <= 2 * distance(half, ours[5])
    assert distance(theirs, ours[4]) > 2 * distance(half, ours[5])
    assert distance(theirs, ours[6]) > 2 * distance(half, ours[5])


@settings(max_examples=30)
@given(shape=shapes, dtype=st.sampled_from(FULL + HALF), seed=seeds, extra=st.integers(0, 3))
def test_coefficients_act_on_the_singular_values(shape, dtype, seed, extra):
    """p_K(…p_1(σ/‖S‖_F)), the last repeated up to `steps`, whether in the ball or not."""
    sigma, triples = geometric(min(shape), 1.0), [(2.0, -1.5, 0.6), (1.5, -0.5, 0.0), muon()]
    s = with_singular_values(shape, sigma, seed)
    x = sigma / torch.linalg.vector_norm(sigma)
    for a, b, c in triples + triples[-1:] * extra:
        x = a * x + b * x**3 + c * x**5
    p = polar(s.to(dtype), coefficients=triples, steps=3 + extra if extra else None)
    expected = with_singular_values(shape, x, seed)
    assert p.dtype == dtype
    # Each step multiplies errors by at most 3.5, its slope at 0, and rounds some units anew.
    assert operator_norms(p - expected) <= 3.5 ** (3 + extra) * 100 * eps(dtype)


def test_the_length_that_coefficients_reach():
    """1.203 for five of Jordan's triples, reached where a σ/‖S‖_F is at the largest value."""
    x = torch.linspace(0, 1, 100_001, dtype=F64)
    value = x
    for a, b, c in [muon()] * 5:
        value = a * value + b * value**3 + c * value**5
    worst = x[value.argmax()]
    p = polar(torch.diag(torch.stack([worst, (1 - worst**2).sqrt()])), coefficients=[muon()] * 5)
    most = largest([muon()] * 5)
    assert most == pytest.approx(1.203, abs=1e-3)
    assert most - 1e-6 <= operator_norm(p) <= most + 1e-12


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"coefficients": []}, ValueError, "coefficients must be triples"),
        ({"coefficients": [(1.0, 2.0)]}, ValueError, "coefficients must be triples"),
        ({"coefficients": [(1.0, math.nan, 0.0)]}, ValueError, "coefficients must be triples"),
        ({"coefficients": [muon()] * 3, "steps": 2}, ValueError, "steps must be an integer ≥ 3"),
        ({"coefficients": [muon()], "method": "svd"}, ValueError, "take the place of method"),
        ({"coefficients": [muon()], "rank_tolerance": 0.1}, ValueError, "take the place of"),
    ],
)
def test_bad_coefficients(options, error, words):
    with pytest.raises(error, match=words):
        polar(torch.eye(2), **options)
