"""Theorem 3.2, its corollaries and the terms of its proof against the oracle, and by hand."""

import math

import cvxpy as cp
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import bounds, conversion, learners, lemma, mixtures, unknown
from nucleon.claims.oracle.algebra import moments, nuclear, operator, power, trace_root
from nucleon.online import theory

SHAPES = [(1, 1), (1, 5), (3, 3), (2, 7), (3, 2, 4)]
# Both sides are float64 and differ by a few roundings of a sum of at most 100 positive terms.
RELATIVE = 1e-12


def gram_of(gradients, discount=1.0):
    return torch.from_numpy(moments(gradients, discount)[1])


# ---- the formula -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from([1e-8, 1.0, 1e6]),
    discount=st.sampled_from([0.5, 0.9, 1.0]),
    factor=st.sampled_from([None, 0.1, 3.0]),
    constants=st.sampled_from([(0.5, 1.0), (1.0, 1.0), (4.0, 0.7)]),
)
def test_gbpa_bound_is_the_formula(seed, shape, scale, discount, factor, constants):
    gradients = scale * np.random.default_rng(seed).standard_normal((6, *shape))
    game = {"radius": 1.7, "discount": discount}
    expected = bounds.gbpa(gradients, constants, bound=2 * scale, factor=factor or 1.0, **game)
    bound = theory.gbpa_bound(
        gram_of(gradients, discount),
        gradient_bound=2 * scale,
        alpha=constants[0],
        beta=constants[1],
        first_nuclear=torch.as_tensor(nuclear(gradients[0])),
        rounds=6,
        eta=None if factor is None else factor * bounds.eta(constants),
        excess=0.3 * scale,
        **game,
    )
    assert bound.dtype == torch.float64 and bound.shape == shape[:-2]
    # Cancellation with a negative first term costs no more than the sum of the sizes.
    np.testing.assert_allclose(
        bound, expected + 2 * 1.7 * 0.3 * scale, rtol=1e-10, atol=1e-9 * scale
    )


def test_bounds_of_games_broadcast():
    gradients = np.random.default_rng(2).standard_normal((5, 3, 2, 4))
    levels = np.array([1.0, 2.0, 3.0])
    faml = theory.faml_bound(
        gram_of(gradients), radius=1.0, gradient_bound=torch.from_numpy(levels)
    )
    np.testing.assert_allclose(faml, bounds.faml(gradients, radius=1.0, bound=levels), rtol=1e-12)
    empty = theory.faml_bound(torch.zeros(0, 4, 4), radius=1.0, gradient_bound=1.0)
    assert empty.shape == (0,)


# ---- the corollaries ---------------------------------------------------------------------------


def test_corollaries_are_the_printed_ones():
    gram = torch.diag(torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64))  # Tr √M = 7
    shared = {"radius": 2.0, "gradient_bound": 0.5}
    assert theory.faml_bound(gram, **shared).item() == pytest.approx(2 * 2 * (7 + 1.5))
    halved = theory.faml_bound(gram, discount=0.5, **shared).item()
    assert halved == pytest.approx(2 * 2 * (7 + 3.0))
    printed = theory.ftpl_bound(gram, width=20, **shared).item()
    assert printed == pytest.approx(2 * math.sqrt(2) * 2 * (20 / 16) ** 0.25 * 8.5)
    ftrl = theory.ftrl_bound(gram, first_nuclear=1.1, gaps=0.3, **shared).item()
    root = sum(math.sqrt(0.25 + s) for s in (1, 4, 16))
    assert ftrl == pytest.approx(2 * (math.sqrt(2) * root + (1 - math.sqrt(0.5)) * 1.1 + 0.3))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), extra=st.integers(2, 200))
def test_gbpa_forms_are_never_above_the_printed_ones(seed, rows, extra):
    width = rows + extra
    gradients = np.random.default_rng(seed).standard_normal((4, rows, width))
    gram, level = gram_of(gradients), operator(gradients).max()
    shared = {"radius": 1.0, "gradient_bound": level}
    assert theory.ftpl_constants(rows, width) == pytest.approx(bounds.gaussian(rows, width))
    factor = theory.ftpl_factor(rows, width)
    assert factor == pytest.approx(conversion.pion_factor(rows, width))
    printed = theory.ftpl_bound(gram, width=width, **shared).item()
    assert printed == pytest.approx(bounds.ftpl(gradients, width=width, radius=1.0, bound=level))
    game = {"radius": 1.0, "bound": level}
    assert bounds.gbpa(gradients, bounds.gaussian(rows, width), **game) <= printed
    faml = bounds.gbpa(gradients, bounds.HYPERBOLIC, **game)
    assert faml <= theory.faml_bound(gram, **shared).item() * (1 + RELATIVE)


def test_padding_brings_ftpl_to_twice_the_trace_slowly():
    products = [math.prod(theory.ftpl_constants(8, width)) for width in (16, 64, 10**4, 10**8)]
    assert products == sorted(products, reverse=True)
    # αβ − 1 ≈ √(m/n')
    assert products[-1] - 1 == pytest.approx(math.sqrt(8 / 10**8), rel=1e-2)
    assert theory.ftpl_factor(8, 10**8) == pytest.approx(1.0, abs=1e-7)


# ---- a bound that is not known beforehand ------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("name", ["growing", "heavy", "gaussian"])
def test_running_maximum_is_unconditional_with_its_excess(name, shape, clip):
    rng = np.random.default_rng(4)
    gradients = rng.standard_normal((40, *shape))
    if name != "gaussian":
        sizes = 1.2 ** np.arange(40) if name == "growing" else rng.lognormal(0, 3, 40)
        gradients *= sizes[:, None, None]
    fed = unknown.fed_matrices(gradients, clip=clip, bound=None)
    for t in range(1, 40):
        above = theory.spectral_excess(torch.from_numpy(gradients[t]), float(fed.levels[t - 1]))
        assert above.item() == pytest.approx(fed.excess[t], rel=1e-9, abs=1e-9 * fed.levels[t])
    excess = float(fed.excess.sum())
    bound = theory.gbpa_bound(
        gram_of(fed.gradients),
        radius=1.0,
        gradient_bound=float(fed.levels[-1]),
        alpha=1.0,
        beta=1.0,
        first_nuclear=float(nuclear(gradients[0])),
        excess=excess,
    )
    actions = unknown.gbpa(learners.augmented, gradients, clip=clip)
    assert learners.regret(gradients, actions, radius=1.0) <= bound.item()
    ahead = theory.running_excess_bound(
        rows=shape[0],
        first_operator=float(fed.levels[0]),
        largest_operator=float(fed.levels[-1]),
    )
    assert excess <= ahead.item() * (1 + 1e-9)


def test_a_bound_that_ignores_the_excess_is_broken():
    # 2,000 tiny gradients bring the action to −1, then one large step the other way and its echo.
    tail = -0.1 / np.sqrt(np.arange(1, 1001))
    stream = np.concatenate([np.full(2000, 1e-9), [-1.0], tail]).reshape(-1, 1, 1)
    actions = learners.gbpa(learners.augmented, stream, radius=1.0, bound=np.zeros(3001), eta=1.0)
    regret = learners.regret(stream, actions, radius=1.0)
    game = {"radius": 1.0, "gradient_bound": 0.0, "alpha": 1.0, "beta": 1.0, "first_nuclear": 1e-9}
    assert regret > theory.gbpa_bound(gram_of(stream), **game).item() * 1.1
    excess = float(np.abs(stream[1:]).sum())  # everything is above a bound of 0
    assert regret <= theory.gbpa_bound(gram_of(stream), excess=excess, **game).item()


def test_spectral_excess_is_the_smallest():
    gradient = np.random.default_rng(7).standard_normal((3, 4))
    inside = cp.Variable((3, 4))
    problem = cp.Problem(cp.Minimize(cp.normNuc(gradient - inside)), [cp.sigma_max(inside) <= 0.8])
    excess = theory.spectral_excess(torch.from_numpy(gradient), 0.8).item()
    assert excess == pytest.approx(problem.solve(solver="CLARABEL"), rel=1e-5)  # solver's accuracy
    assert theory.spectral_excess(torch.from_numpy(gradient), 100.0).item() == 0


def test_scalar_baseline_needs_the_root_of_m():
    m, rounds = 8, 100
    heads = scipy.stats.binom(rounds, 0.5)
    counts = np.arange(rounds + 1)
    drift = float(np.sum(heads.pmf(counts) * np.abs(2 * counts - rounds)))
    expected_regret = m * drift  # of every learner, since E⟨G_t, X_t⟩ = 0
    square_sum = torch.tensor(float(m * rounds))
    assert expected_regret > 2 * math.sqrt(square_sum)
    baseline = {"rows": m, "radius": 1.0, "gradient_bound": math.sqrt(m)}
    first = {"first_frobenius": math.sqrt(m)}
    bound = theory.scalar_gbpa_bound(square_sum, alpha=0.5, beta=1.0, **baseline, **first).item()
    by_hand = math.sqrt(2 * m * (m + m * rounds)) + m * (1 - math.sqrt(0.5))
    assert bound == pytest.approx(by_hand, rel=RELATIVE) and expected_regret <= bound
    gradients = np.ones((rounds, m, m)) / math.sqrt(m)
    hyperbolic = theory.scalar_gbpa_bound(square_sum, alpha=1.0, beta=1.0, **baseline, **first)
    oracle = bounds.scalar_gbpa(gradients, radius=1.0, bound=math.sqrt(m))
    assert hyperbolic.item() == pytest.approx(oracle, rel=RELATIVE)


# ---- one term at a time ------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES[:4]), scale=st.floats(1e-3, 1e3))
def test_terms_of_the_decomposition_obey_their_bounds(seed, shape, scale):
    rng = np.random.default_rng(seed)
    total, gradient = rng.standard_normal(shape), scale * rng.standard_normal(shape)
    factor, growth = rng.standard_normal((2, shape[0], shape[0]))
    smoothing = factor @ factor.T + 0.1 * np.eye(shape[0])
    larger = smoothing + growth @ growth.T
    value = lemma.hyperbolic_value
    bregman = value(total + gradient, smoothing) - value(total, smoothing)
    bregman -= float(np.sum(gradient * learners.augmented(total, smoothing)))
    bound = theory.bregman_bound(torch.from_numpy(gradient), torch.from_numpy(smoothing), beta=1.0)
    by_hand = 0.5 * np.trace(gradient.T @ power(smoothing, -0.5) @ gradient)
    assert bound.item() == pytest.approx(float(by_hand), rel=1e-9)
    assert bregman <= bound.item() + 1e-10 * value(total + gradient, smoothing)
    rise = value(total, larger) - value(total, smoothing)
    ceiling = theory.stability_bound(
        torch.from_numpy(smoothing), torch.from_numpy(larger), alpha=1.0
    )
    assert ceiling.item() == pytest.approx(trace_root(larger) - trace_root(smoothing), rel=1e-9)
    assert rise <= ceiling.item() + 1e-10 * value(total, larger)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES[:4]), product=st.floats(0.5, 4))
def test_tradeoff_is_tight_at_the_proof_s_choice(seed, shape, product):
    rng = np.random.default_rng(seed)
    x, factor = rng.standard_normal(shape), rng.standard_normal((shape[0], shape[0]))
    pair = (2.0, product / 2.0)
    other = factor @ factor.T + 0.01 * np.eye(shape[0])
    for root in (mixtures.best_root(x, pair), other):
        tensors = torch.from_numpy(x), torch.from_numpy((root + root.T) / 2)
        sides = theory.admissibility_tradeoff(*tensors, alpha=pair[0], beta=pair[1])
        # L⁻¹ amplifies the rounding of the square root by the condition number of XXᵀ.
        tolerance = RELATIVE + 1e-13 * np.linalg.cond(x @ x.T)
        assert sides.left.item() == pytest.approx(nuclear(x), rel=RELATIVE)
        assert sides.right.item() == pytest.approx(mixtures.ceiling(x, root, pair), rel=tolerance)
        assert sides.left <= sides.right * (1 + tolerance)
        if root is not other:
            tight = math.sqrt(2 * product) * nuclear(x)
            assert sides.right.item() == pytest.approx(tight, rel=tolerance)


# ---- bad input ---------------------------------------------------------------------------------
