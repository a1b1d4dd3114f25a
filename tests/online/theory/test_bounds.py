"""The regret bounds against the oracle, by hand where it has no twin, and where they must fail."""

import math

import cvxpy as cp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import bounds, conversion
from nucleon.claims.oracle.algebra import inner, moments, nuclear, operator, transposed
from nucleon.online import theory

SHAPES = [(1, 1), (1, 5), (3, 3), (2, 7), (3, 2, 4)]
# Both sides are float64 and differ by a few roundings of a sum of at most 100 positive terms.
RELATIVE = 1e-12
GAME = {"radius": 1.7, "bound": 4.0}
OURS = {"radius": 1.7, "gradient_bound": 4.0}


def gram_of(gradients, discount=1.0):
    return torch.from_numpy(moments(gradients, discount)[1])


def grams_of(gradients):
    return gram_of(gradients), gram_of(transposed(gradients))


def scalar(gradients):
    square_sum = torch.as_tensor(inner(gradients, gradients).sum(0))
    first, rows = torch.as_tensor(inner(gradients[0], gradients[0]) ** 0.5), gradients.shape[-2]
    constants = {"alpha": 1.0, "beta": 1.0, "rows": rows, "first_frobenius": first}
    return theory.scalar_gbpa_bound(square_sum, **constants, **OURS)


BOUNDS = {
    "FTPL": (
        lambda g: theory.ftpl_bound(gram_of(g), width=20, **OURS),
        lambda g: bounds.ftpl(g, width=20, **GAME),
    ),
    "FAML": (lambda g: theory.faml_bound(gram_of(g), **OURS), lambda g: bounds.faml(g, **GAME)),
    "scalar": (scalar, lambda g: bounds.scalar_gbpa(g, **GAME)),
    "one-sided Shampoo": (
        lambda g: theory.one_sided_shampoo_bound(gram_of(g), radius=1.7),
        lambda g: bounds.one_sided_shampoo(g, radius=1.7),
    ),
    "Shampoo": (
        lambda g: theory.shampoo_bound(*grams_of(g), radius=1.7),
        lambda g: bounds.shampoo(g, radius=1.7),
    ),
    "original Shampoo": (
        lambda g: theory.original_shampoo_bound(*grams_of(g), radius=1.7, rank=2),
        lambda g: bounds.original_shampoo(g, radius=1.7, rank=2),
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES))
def test_bounds_are_those_of_the_oracle(name, seed, shape):
    gradients = np.random.default_rng(seed).standard_normal((9, *shape))
    ours, oracle = (bound(gradients) for bound in BOUNDS[name])
    assert ours.dtype == torch.float64 and ours.shape == shape[:-2]
    # A zero eigenvalue of N_T is off by rounding, its fourth root by 1e-4, beside sums above 1.
    np.testing.assert_allclose(ours, oracle, rtol=2e-3 if "Shampoo" in name else RELATIVE)


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
    levels = scale * np.arange(2.0, 2.0 + math.prod(shape[:-2])).reshape(shape[:-2])
    expected = bounds.gbpa(gradients, constants, bound=levels, factor=factor or 1.0, **game)
    bound = theory.gbpa_bound(
        gram_of(gradients, discount),
        gradient_bound=torch.as_tensor(levels),
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


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), extra=st.integers(2, 200))
def test_gbpa_forms_are_never_above_the_printed_ones(seed, rows, extra):
    width = rows + extra
    gradients = np.random.default_rng(seed).standard_normal((4, rows, width))
    gram, level = gram_of(gradients), operator(gradients).max()
    assert theory.ftpl_constants(rows, width) == pytest.approx(bounds.gaussian(rows, width))
    factor = theory.ftpl_factor(rows, width)
    assert factor == pytest.approx(conversion.pion_factor(rows, width))
    game, shared = {"radius": 1.0, "bound": level}, {"radius": 1.0, "gradient_bound": level}
    printed = theory.ftpl_bound(gram, width=width, **shared).item()
    assert bounds.gbpa(gradients, bounds.gaussian(rows, width), **game) <= printed
    printed = theory.faml_bound(gram, **shared).item()
    assert bounds.gbpa(gradients, bounds.HYPERBOLIC, **game) <= printed * (1 + RELATIVE)
    halved = theory.faml_bound(gram, discount=0.5, **shared).item()
    assert halved == pytest.approx(printed + 2 * rows * level)


# ---- a bound that is not known beforehand ------------------------------------------------------


def test_spectral_excess_is_the_smallest():
    gradient = np.random.default_rng(7).standard_normal((3, 4))
    inside = cp.Variable((3, 4))
    problem = cp.Problem(cp.Minimize(cp.normNuc(gradient - inside)), [cp.sigma_max(inside) <= 0.8])
    excess = theory.spectral_excess(torch.from_numpy(gradient), 0.8).item()
    assert excess == pytest.approx(problem.solve(solver="CLARABEL"), rel=1e-5)  # solver's accuracy
    assert theory.spectral_excess(torch.from_numpy(gradient), 100.0).item() == 0


# ---- the baselines -----------------------------------------------------------------------------


def test_scalar_baseline_needs_the_root_of_m():
    m, rounds = 8, 100
    heads = scipy.stats.binom(rounds, 0.5)
    counts = np.arange(rounds + 1)
    drift = float(np.sum(heads.pmf(counts) * np.abs(2 * counts - rounds)))
    expected_regret = m * drift  # of every learner, since E⟨G_t, X_t⟩ = 0
    square_sum, level = torch.tensor(float(m * rounds)), math.sqrt(m)
    assert expected_regret > 2 * math.sqrt(square_sum)
    game = {"rows": m, "radius": 1.0, "gradient_bound": level, "first_frobenius": level}
    bound = theory.scalar_gbpa_bound(square_sum, alpha=0.5, beta=1.0, **game).item()
    by_hand = math.sqrt(2 * m * (m + m * rounds)) + m * (1 - math.sqrt(0.5))
    assert bound == pytest.approx(by_hand, rel=RELATIVE) and expected_regret <= bound


MOMENT = torch.tensor([9.0, 16.0, 0.0, 144.0], dtype=torch.float64)  # √sum 13, sum of roots 19
TRACE = {"scalar": 13.0, "diagonal": 19.0, "full": 19.0}


@pytest.mark.parametrize("preconditioner", ["scalar", "diagonal", "full"])
@pytest.mark.parametrize("update", ["ogd", "ftrl", "proximal"])
@pytest.mark.parametrize("ball", ["l2", "linf"])
def test_table_two_by_hand(preconditioner, update, ball):
    moment = MOMENT.diag() if preconditioner == "full" else MOMENT
    euclidean = 3.0 * (2.0 if ball == "linf" else 1.0)  # √d = 2
    norm = 3.0 if preconditioner == "diagonal" else euclidean
    reach = {"ftrl": 1}.get(update, 2)
    shared = {"preconditioner": preconditioner, "update": update, "ball": ball, "radius": 3.0}
    trace = TRACE[preconditioner]
    optimal = theory.adagrad_bound(moment, **shared).item()
    assert optimal == pytest.approx(math.sqrt(2) * reach * norm * trace)
    general = theory.adagrad_bound(moment, eta=0.5, delta=0.7, excess=0.1, **shared).item()
    by_hand = ((reach * norm) ** 2 + 0.5) * trace + 0.7 * (reach * euclidean) ** 2
    assert general == pytest.approx(by_hand + 2 * norm * 0.1)


@pytest.mark.parametrize("d", [2, 3, 10, 1000])
def test_gaussian_constants_are_moments_of_chi(d):
    alpha, beta = theory.gaussian_ftpl_constants(d)
    law = scipy.stats.chi(d)
    center = law.mean()
    assert alpha == pytest.approx(center, rel=1e-9)
    inverse, _ = scipy.integrate.quad(
        lambda y: law.pdf(y) / y, 0, center + 12, points=[center], limit=200
    )
    assert beta == pytest.approx(inverse, rel=1e-6)
    loose = theory.ftpl_constants(1, d)[1] if d >= 3 else math.inf
    assert beta < loose and alpha * beta > 1


def test_shampoo_s_bounds_by_hand():
    """With η, ε and gaps of one's own; eigenvalues (1, 16) and (16, 1, 0)."""
    gram = torch.diag(torch.tensor([1.0, 16.0], dtype=torch.float64))
    columns = torch.diag(torch.tensor([16.0, 1.0, 0.0], dtype=torch.float64))
    options = {"radius": 3.0, "eta": 2.0, "epsilon": 9.0, "gaps": 0.25}
    one_sided = theory.one_sided_shampoo_bound(gram, **options)
    root = math.sqrt(10) + 5
    assert one_sided.item() == pytest.approx(9 * root + 2 * (root - 2 * 3) + 0.25)
    shampoo = theory.shampoo_bound(gram, columns, **options)
    left, right = [10**0.25, 25**0.25], [25**0.25, 10**0.25, 9**0.25]
    distance = left[1] * sum(right) + sum(left) * right[0]
    gradient = math.sqrt((math.sqrt(10) + 5 - 6) * (5 + math.sqrt(10) + 3 - 9))
    assert shampoo.item() == pytest.approx(9 * distance + 2 * gradient + 0.25)
    original = theory.original_shampoo_bound(gram, columns, radius=3.0, rank=2)
    improved = theory.shampoo_bound(gram, columns, radius=3.0)
    assert original.item() > improved.item()
