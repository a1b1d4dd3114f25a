"""Theorem 3.2 and its corollaries against NumPy games and SciPy square roots."""

import math

import cvxpy as cp
import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nucleon.online import theory

Array = NDArray[np.float64]
SHAPES = [(1, 1), (1, 5), (3, 3), (2, 7)]
# Both sides are float64 and differ by a few roundings of a sum of at most 100 positive terms.
RELATIVE = 1e-12


def nuclear(x: Array) -> float:
    return float(np.linalg.svd(x, compute_uv=False).sum())


def operator(x: Array) -> float:
    return float(np.linalg.svd(x, compute_uv=False).max())


def gram_of(gradients: Array, discount: float = 1.0) -> torch.Tensor:
    weights = discount ** np.arange(len(gradients))[::-1]
    return torch.from_numpy(np.einsum("t,tik,tjk->ij", weights**2, gradients, gradients))


def root_trace(matrix: Array) -> float:
    """Tr √M by Schur square roots, no eigenvalues."""
    return float(np.trace(np.real(scipy.linalg.sqrtm(matrix))))


def hyperbolic_step(total: Array, smoothing: Array) -> Array:
    values, vectors = np.linalg.eigh(total @ total.T + smoothing)
    return vectors @ np.diag(1 / np.sqrt(np.maximum(values, 1e-300))) @ vectors.T @ total


def faml_regret(gradients: Array, levels: Array, eta: float = 1.0, fed: Array | None = None):
    """Regret of FAML with radius 1 whose bound before round t+1 is levels[t]; `fed` if clipped."""
    fed = gradients if fed is None else fed
    m, _ = gradients.shape[1:]
    total, gram = np.zeros_like(gradients[0]), np.zeros((m, m))
    action, loss = np.zeros_like(total), 0.0
    for gradient, seen, level in zip(gradients, fed, levels, strict=True):
        loss += float(np.sum(gradient * action))
        total, gram = total + seen, gram + seen @ seen.T
        action = -hyperbolic_step(total, (level**2 * np.eye(m) + gram) / eta**2)
    return loss + nuclear(gradients.sum(0))


def streams(seed: int, rounds: int, shape: tuple[int, int]) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    unit = np.eye(*shape)
    signs = np.array([0.5] + [(-1.0) ** t for t in range(1, rounds)])
    gaussian = rng.standard_normal((rounds, *shape))
    return {
        "alternating": signs[:, None, None] * unit,
        "gaussian": gaussian,
        "drift": gaussian + 0.5,
        "growing": gaussian * 1.2 ** np.arange(rounds)[:, None, None],
        "heavy": gaussian * rng.lognormal(0, 3, (rounds, 1, 1)),
    }


# ---- the formula -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from([1e-8, 1.0, 1e6]),
    discount=st.sampled_from([0.5, 0.9, 1.0]),
    eta=st.sampled_from([None, 0.1, 3.0]),
    constants=st.sampled_from([(0.5, 1.0), (1.0, 1.0), (4.0, 0.7)]),
)
def test_gbpa_bound_is_the_formula(seed, shape, scale, discount, eta, constants):
    gradients = scale * np.random.default_rng(seed).standard_normal((6, *shape))
    alpha, beta = constants
    level, radius, excess = 2 * scale, 1.7, 0.3 * scale
    step = math.sqrt(alpha / beta) if eta is None else eta
    gram = gram_of(gradients, discount)
    root = root_trace(gram.numpy() + (level / discount) ** 2 * np.eye(shape[0]))
    first = discount**5 * nuclear(gradients[0])
    expected = radius * (
        (beta * step + alpha / step) * root + (1 - beta * step) * first + 2 * excess
    )
    bound = theory.gbpa_bound(
        gram,
        radius=radius,
        gradient_bound=level,
        alpha=alpha,
        beta=beta,
        first_nuclear=nuclear(gradients[0]),
        discount=discount,
        rounds=6,
        eta=eta,
        excess=excess,
    )
    assert bound.dtype == torch.float64 and bound.shape == ()
    # Cancellation with a negative first term costs no more than the size of the first term.
    assert abs(bound.item() - expected) <= 1e-10 * radius * (root * (beta * step + alpha / step))


def test_one_dimensional_case_by_hand():
    bound = theory.gbpa_bound(
        torch.tensor([[3.0]]), radius=2.0, gradient_bound=1.0, alpha=0.5, beta=1.0, first_nuclear=1
    )
    by_hand = 2 * (math.sqrt(2) * 2 + (1 - math.sqrt(0.5)) * 1)  # √(1+3) = 2
    assert bound.item() == pytest.approx(by_hand, rel=RELATIVE)


def test_diagonal_case_is_a_sum_over_coordinates():
    squares = torch.tensor([0.0, 1.0, 4.0, 9.0], dtype=torch.float64)
    bound = theory.gbpa_bound(
        squares.diag(), radius=1.0, gradient_bound=2.0, alpha=1.0, beta=1.0, first_nuclear=7.0
    )
    assert bound.item() == pytest.approx(2 * np.sqrt(4 + squares.numpy()).sum(), rel=RELATIVE)


@pytest.mark.parametrize("discount", [0.5, 0.9, 0.99])
def test_discounted_form_is_the_plain_one_on_the_rescaled_stream(discount):
    rounds, level = 12, 3.0
    gradients = np.random.default_rng(1).standard_normal((rounds, 3, 4))
    rescaled = gradients * discount ** -np.arange(1, rounds + 1)[:, None, None]
    shared = {"radius": 1.3, "alpha": 2.0, "beta": 1.0, "eta": 0.7}
    discounted = theory.gbpa_bound(
        gram_of(gradients, discount),
        gradient_bound=level,
        first_nuclear=nuclear(gradients[0]),
        discount=discount,
        rounds=rounds,
        **shared,
    )
    plain = theory.gbpa_bound(
        gram_of(rescaled),
        gradient_bound=level * discount ** -(rounds + 1),
        first_nuclear=nuclear(rescaled[0]),
        **shared,
    )
    assert discounted.item() == pytest.approx(discount**rounds * plain.item(), rel=1e-10)


def test_default_eta_is_the_best_one():
    def bound(eta):
        return theory.gbpa_bound(
            torch.eye(3),
            radius=1.0,
            gradient_bound=1.0,
            alpha=3.0,
            beta=0.5,
            first_nuclear=0.0,
            eta=eta,
        ).item()

    assert bound(None) == pytest.approx(2 * math.sqrt(1.5) * 3 * math.sqrt(2), rel=RELATIVE)
    assert all(bound(None) < bound(eta) for eta in (1.0, 2.0, 2.4, 2.5, 5.0))


def test_bound_grows_with_the_gram_and_the_gradient_bound():
    def bound(scale, level):
        return theory.faml_bound(scale * torch.eye(3), radius=1.0, gradient_bound=level).item()

    assert bound(1.0, 1.0) < bound(2.0, 1.0) < bound(2.0, 3.0)


def test_batches_match_single_games():
    gradients = np.random.default_rng(2).standard_normal((3, 5, 2, 4))
    grams = torch.stack([gram_of(g) for g in gradients])
    levels, firsts = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 0.3])
    shared = {"radius": 1.0, "alpha": 0.5, "beta": 1.0}
    batch = theory.gbpa_bound(grams, gradient_bound=levels, first_nuclear=firsts, **shared)
    singles = [
        theory.gbpa_bound(g, gradient_bound=lv.item(), first_nuclear=f.item(), **shared)
        for g, lv, f in zip(grams, levels, firsts, strict=True)
    ]
    torch.testing.assert_close(batch, torch.stack(singles), rtol=RELATIVE, atol=0)
    empty = theory.faml_bound(torch.zeros(0, 4, 4), radius=1.0, gradient_bound=1.0)
    assert empty.shape == (0,)


# ---- the corollaries ---------------------------------------------------------------------------


def test_corollaries_are_the_printed_ones():
    gram = torch.diag(torch.tensor([1.0, 4.0, 16.0], dtype=torch.float64))  # Tr √M = 7
    shared = {"radius": 2.0, "gradient_bound": 0.5}
    assert theory.faml_bound(gram, **shared).item() == pytest.approx(2 * 2 * (7 + 1.5))
    halved = theory.faml_bound(gram, discount=0.5, **shared).item()
    assert halved == pytest.approx(2 * 2 * (7 + 3.0))
    factor = (20 / 16) ** 0.25
    printed = theory.ftpl_bound(gram, width=20, **shared).item()
    assert printed == pytest.approx(2 * math.sqrt(2) * 2 * factor * 8.5)
    ftrl = theory.ftrl_bound(gram, first_nuclear=1.1, **shared).item()
    root = sum(math.sqrt(0.25 + s) for s in (1, 4, 16))
    assert ftrl == pytest.approx(2 * (math.sqrt(2) * root + (1 - math.sqrt(0.5)) * 1.1))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), extra=st.integers(2, 200))
def test_gbpa_forms_are_never_above_the_printed_ones(seed, rows, extra):
    gradients = np.random.default_rng(seed).standard_normal((4, rows, rows + extra))
    gram, level = gram_of(gradients), max(map(operator, gradients))
    shared = {"radius": 1.0, "gradient_bound": level}
    alpha, beta = theory.ftpl_constants(rows, rows + extra)
    first = nuclear(gradients[0])
    ftpl = theory.gbpa_bound(gram, alpha=alpha, beta=beta, first_nuclear=first, **shared)
    assert ftpl <= theory.ftpl_bound(gram, width=rows + extra, **shared)
    faml = theory.gbpa_bound(gram, alpha=1.0, beta=1.0, first_nuclear=first, **shared)
    assert faml <= theory.faml_bound(gram, **shared) * (1 + RELATIVE)


def test_ftpl_constants_by_hand():
    assert theory.ftpl_constants(3, 20) == pytest.approx((math.sqrt(3) + math.sqrt(20), 1 / 4))


def test_padding_brings_ftpl_to_twice_the_trace_slowly():
    products = [math.prod(theory.ftpl_constants(8, width)) for width in (16, 64, 10**4, 10**8)]
    assert products == sorted(products, reverse=True)
    # αβ − 1 ≈ √(m/n')
    assert products[-1] - 1 == pytest.approx(math.sqrt(8 / 10**8), rel=1e-2)
    assert theory.ftpl_factor(8, 10**8) == pytest.approx(1.0, abs=1e-7)


# ---- games played in NumPy ---------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["alternating", "gaussian", "drift"])
def test_faml_stays_below_its_bound_for_every_eta(name, shape, eta):
    gradients = streams(3, 60, shape)[name]
    level = max(map(operator, gradients))
    regret = faml_regret(gradients, np.full(60, level), eta)
    bound = theory.gbpa_bound(
        gram_of(gradients),
        radius=1.0,
        gradient_bound=level,
        alpha=1.0,
        beta=1.0,
        first_nuclear=nuclear(gradients[0]),
        eta=eta,
    )
    assert regret <= bound.item()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["growing", "heavy", "gaussian"])
def test_running_maximum_is_unconditional_with_its_excess(name, shape, clip):
    gradients = streams(4, 40, shape)[name]
    levels = np.maximum.accumulate([operator(g) for g in gradients])
    fed, excess = [gradients[0]], 0.0
    for gradient, level in zip(gradients[1:], levels[:-1], strict=True):
        above = theory.spectral_excess(torch.from_numpy(gradient), float(level)).item()
        u, s, v = np.linalg.svd(gradient, full_matrices=False)
        fed.append(u @ np.diag(np.minimum(s, level)) @ v)
        assert above == pytest.approx(nuclear(gradient - fed[-1]), rel=1e-9, abs=1e-9 * level)
        excess += above
    played = np.stack(fed) if clip else gradients
    shared = {
        "radius": 1.0,
        "gradient_bound": levels[-1],
        "alpha": 1.0,
        "beta": 1.0,
        "first_nuclear": nuclear(gradients[0]),
    }
    bound = theory.gbpa_bound(gram_of(played), excess=excess, **shared)
    assert faml_regret(gradients, levels, fed=played) <= bound.item()
    ahead = theory.running_excess_bound(
        rows=shape[0], first_operator=levels[0], largest_operator=levels[-1]
    )
    assert excess <= ahead.item() * (1 + 1e-9)


def test_a_bound_that_ignores_the_excess_is_broken():
    # 2,000 tiny gradients bring the action to −1, then one large step the other way and its echo.
    tail = -0.1 / np.sqrt(np.arange(1, 1001))
    stream = np.concatenate([np.full(2000, 1e-9), [-1.0], tail]).reshape(-1, 1, 1)
    regret = faml_regret(stream, np.zeros(len(stream)))
    shared = {
        "radius": 1.0,
        "gradient_bound": 0.0,
        "alpha": 1.0,
        "beta": 1.0,
        "first_nuclear": 1e-9,
    }
    assert regret > theory.gbpa_bound(gram_of(stream), **shared).item() * 1.1
    excess = float(np.abs(stream[1:]).sum())  # everything is above a bound of 0
    assert regret <= theory.gbpa_bound(gram_of(stream), excess=excess, **shared).item()


@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0])
def test_ftrl_bound_carries_the_gaps(noise):
    rng = np.random.default_rng(5)
    rounds, n, eta = 400, 4, math.sqrt(0.5)
    gram, level, gaps, loss = 0.0, 1.0, 0.0, 0.0
    total, action, first = np.zeros(n), np.zeros(n), None
    for _ in range(rounds):
        # an adversary that punishes whatever was played, and turns on itself otherwise
        direction = action if np.linalg.norm(action) > 1e-3 else rng.standard_normal(n)
        gradient = direction / np.linalg.norm(direction)
        first = gradient if first is None else first
        loss += gradient @ action
        total, gram = total + gradient, gram + gradient @ gradient
        weight = math.sqrt(level**2 + gram) / eta
        exact = total / max(weight, np.linalg.norm(total))
        inexact = exact + noise * rng.standard_normal(n)
        inexact /= max(1.0, np.linalg.norm(inexact))
        slope = total - weight * inexact
        gaps += np.linalg.norm(slope) - slope @ inexact
        action = -inexact
    regret = loss + np.linalg.norm(total)
    shared = {"radius": 1.0, "gradient_bound": level, "first_nuclear": np.linalg.norm(first)}
    gram = torch.tensor([[gram]], dtype=torch.float64)
    assert regret <= theory.ftrl_bound(gram, gaps=float(gaps), **shared).item()
    if noise == 2.0:
        assert regret > theory.ftrl_bound(gram, **shared).item()


# ---- the scalar baseline -----------------------------------------------------------------------


def test_scalar_baseline_needs_the_root_of_m():
    m, rounds = 8, 100
    heads = scipy.stats.binom(rounds, 0.5)
    counts = np.arange(rounds + 1)
    drift = float(np.sum(heads.pmf(counts) * np.abs(2 * counts - rounds)))
    expected_regret = m * drift  # of every learner, since E⟨G_t, X_t⟩ = 0
    square_sum = torch.tensor(float(m * rounds))
    assert expected_regret > 2 * math.sqrt(square_sum)
    bound = theory.scalar_gbpa_bound(
        square_sum,
        rows=m,
        radius=1.0,
        gradient_bound=math.sqrt(m),
        alpha=0.5,
        beta=1.0,
        first_frobenius=math.sqrt(m),
    )
    level = math.sqrt(m + m * rounds)
    by_hand = math.sqrt(2 * m) * level + math.sqrt(m) * (1 - math.sqrt(0.5)) * math.sqrt(m)
    assert bound.item() == pytest.approx(by_hand, rel=RELATIVE)
    assert expected_regret <= bound.item()


@pytest.mark.parametrize("name", ["alternating", "gaussian", "drift"])
def test_scalar_faml_stays_below_the_baseline(name):
    gradients = streams(6, 60, (3, 5))[name]
    level = max(np.linalg.norm(g) for g in gradients)
    eta, total, squares, loss = math.sqrt(3), np.zeros((3, 5)), 0.0, 0.0
    action = np.zeros((3, 5))
    for gradient in gradients:
        loss += np.sum(gradient * action)
        total, squares = total + gradient, squares + np.sum(gradient**2)
        action = -hyperbolic_step(total, (level**2 + squares) / eta**2 * np.eye(3))
    bound = theory.scalar_gbpa_bound(
        torch.tensor(squares),
        rows=3,
        radius=1.0,
        gradient_bound=float(level),
        alpha=1.0,
        beta=1.0,
        first_frobenius=float(np.linalg.norm(gradients[0])),
    )
    assert loss + nuclear(total) <= bound.item()


# ---- one term at a time ------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES), scale=st.floats(1e-3, 1e3))
def test_terms_of_the_decomposition_obey_their_bounds(seed, shape, scale):
    rng = np.random.default_rng(seed)
    total, gradient = rng.standard_normal(shape), scale * rng.standard_normal(shape)
    factor, growth = rng.standard_normal((2, shape[0], shape[0]))
    smoothing = factor @ factor.T + 0.1 * np.eye(shape[0])
    larger = smoothing + growth @ growth.T

    def value(s, a):
        return root_trace(s @ s.T + a)

    bregman = value(total + gradient, smoothing) - value(total, smoothing)
    bregman -= float(np.sum(gradient * hyperbolic_step(total, smoothing)))
    bound = theory.bregman_bound(torch.from_numpy(gradient), torch.from_numpy(smoothing), beta=1.0)
    by_hand = 0.5 * np.trace(gradient.T @ np.linalg.inv(scipy.linalg.sqrtm(smoothing)) @ gradient)
    assert bound.item() == pytest.approx(float(by_hand), rel=1e-9)
    assert bregman <= bound.item() + 1e-10 * value(total + gradient, smoothing)
    rise = value(total, larger) - value(total, smoothing)
    ceiling = theory.stability_bound(
        torch.from_numpy(smoothing), torch.from_numpy(larger), alpha=1.0
    )
    assert ceiling.item() == pytest.approx(root_trace(larger) - root_trace(smoothing), rel=1e-9)
    assert rise <= ceiling.item() + 1e-10 * value(total, larger)


def test_spectral_excess_is_the_smallest():
    gradient = np.random.default_rng(7).standard_normal((3, 4))
    inside = cp.Variable((3, 4))
    problem = cp.Problem(cp.Minimize(cp.normNuc(gradient - inside)), [cp.sigma_max(inside) <= 0.8])
    excess = theory.spectral_excess(torch.from_numpy(gradient), 0.8).item()
    assert excess == pytest.approx(problem.solve(solver="CLARABEL"), rel=1e-5)  # solver's accuracy
    assert theory.spectral_excess(torch.from_numpy(gradient), 100.0).item() == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES), product=st.floats(0.5, 4))
def test_tradeoff_is_tight_at_the_proof_s_choice(seed, shape, product):
    rng = np.random.default_rng(seed)
    x, factor = rng.standard_normal(shape), rng.standard_normal((shape[0], shape[0]))
    alpha, beta = 2.0, product / 2.0
    best = math.sqrt(beta / (2 * alpha)) * np.real(scipy.linalg.sqrtm(x @ x.T))
    tensors = torch.from_numpy(x), torch.from_numpy((best + best.T) / 2)
    sides = theory.admissibility_tradeoff(*tensors, alpha=alpha, beta=beta)
    # L^{-1} amplifies the rounding of the square root by the condition number of XXᵀ.
    tolerance = 1e-13 * np.linalg.cond(x @ x.T)
    assert sides.left.item() == pytest.approx(nuclear(x), rel=RELATIVE)
    assert sides.right.item() == pytest.approx(
        math.sqrt(2 * product) * nuclear(x), rel=tolerance + RELATIVE
    )
    other = torch.from_numpy(factor @ factor.T + 0.01 * np.eye(shape[0]))
    left, right = theory.admissibility_tradeoff(tensors[0], other, alpha=alpha, beta=beta)
    assert left <= right * (1 + RELATIVE)


# ---- bad input ---------------------------------------------------------------------------------

GOOD = {"radius": 1.0, "gradient_bound": 1.0, "alpha": 1.0, "beta": 1.0, "first_nuclear": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"radius": 0.0}, "radius must be"),
        ({"gradient_bound": -1.0}, "gradient_bound must be"),
        ({"gradient_bound": torch.tensor(-1.0)}, "gradient_bound must be"),
        ({"gradient_bound": torch.ones(5)}, "gradient_bound does not broadcast"),
        ({"alpha": 0.1}, "Proposition 3.3"),
        ({"alpha": 0.1, "eta": 1.0}, "Proposition 3.3"),
        ({"eta": -1.0}, "eta must be"),
        ({"discount": 1.5}, "discount must lie"),
        ({"discount": 0.5}, "rounds is needed"),
        ({"rounds": 0}, "rounds must be"),
        ({"first_nuclear": math.nan}, "first_nuclear must be"),
        ({"excess": -1.0}, "excess must be"),
    ],
)
def test_gbpa_bound_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        theory.gbpa_bound(torch.eye(2), **{**GOOD, **change})


@pytest.mark.parametrize(
    ("gram", "message"),
    [
        (torch.ones(2, 3), "gram must be square"),
        (torch.tensor([[1.0, 2.0], [0.0, 1.0]]), "gram must be symmetric"),
        (torch.diag(torch.tensor([1.0, -1.0])), "positive semidefinite"),
        (torch.full((2, 2), math.inf), "gram must be finite"),
    ],
)
def test_gbpa_bound_refuses_what_is_no_gram(gram, message):
    with pytest.raises(ValueError, match=message):
        theory.gbpa_bound(gram, **GOOD)


def test_other_refusals():
    with pytest.raises(ValueError, match="pad with zero columns"):
        theory.ftpl_constants(4, 5)
    with pytest.raises(ValueError, match="pad with zero columns"):
        theory.ftpl_bound(torch.eye(4), width=5, radius=1.0, gradient_bound=1.0)
    with pytest.raises(ValueError, match="at least first_operator"):
        theory.running_excess_bound(rows=2, first_operator=2.0, largest_operator=1.0)
    with pytest.raises(ValueError, match="positive definite"):
        theory.bregman_bound(torch.ones(2, 3), torch.zeros(2, 2), beta=1.0)
