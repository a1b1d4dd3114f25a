"""Appendix C: the lemmas against NumPy loops, the bounds against hand counts and played games."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.online import theory

SHAPES = [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5)]


def power(matrix, exponent, cutoff=1e-12):
    values, vectors = np.linalg.eigh(matrix)
    keep = values > cutoff * values.max(initial=0.0)
    return vectors[:, keep] @ np.diag(values[keep] ** exponent) @ vectors[:, keep].T


def grams(gradients):
    rows = np.cumsum([g @ g.T for g in gradients], 0)
    columns = np.cumsum([g.T @ g for g in gradients], 0)
    return rows, columns


def ball_points(rng, count, shape, radius):
    points = rng.standard_normal((count, *shape))
    return np.stack([radius * p / np.linalg.norm(p, 2) for p in points])


def gradient_streams(rng, rounds, shape, kind):
    gradients = rng.standard_normal((rounds, *shape))
    if kind == "rank-one":
        gradients = rng.standard_normal((rounds, shape[0], 1)) @ rng.standard_normal((1, shape[1]))
    if kind == "decaying":
        gradients *= 0.5 ** np.arange(rounds)[:, None, None]
    return gradients


# ---- the lemmas --------------------------------------------------------------------------------

# Pseudo-inverse powers of a nearly singular Gram differ with the cutoff; the relative error of the
# summed quadratic forms stays near √eps in the worst stream.
LOOSE = 1e-6


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(["gaussian", "rank-one", "decaying"]),
)
def test_lemmas_c3_and_c4(seed, shape, kind):
    gradients = gradient_streams(np.random.default_rng(seed), 7, shape, kind)
    rows, columns = grams(gradients)
    tensor = torch.from_numpy(gradients)
    potential = sum(
        np.trace(g.T @ power(m, -0.5) @ g) for g, m in zip(gradients, rows, strict=True)
    )
    sides = theory.matrix_potential(tensor)
    assert sides.left.item() == pytest.approx(potential, rel=LOOSE)
    assert sides.right.item() == pytest.approx(2 * np.trace(power(rows[-1], 0.5)), rel=LOOSE)
    transposed = theory.matrix_potential(tensor.mT)
    assert transposed.right.item() == pytest.approx(
        2 * np.trace(power(columns[-1], 0.5)), rel=LOOSE
    )
    crossed = sum(
        np.trace(g.T @ power(m, -0.25) @ g @ power(n, -0.25))
        for g, m, n in zip(gradients, rows, columns, strict=True)
    )
    term = theory.shampoo_gradient_term(tensor)
    assert term.left.item() == pytest.approx(crossed, rel=LOOSE)
    assert term.right.item() == pytest.approx(
        math.sqrt(sides.right.item() * transposed.right.item()), rel=LOOSE
    )
    for left, right in (sides, transposed, term):
        assert left <= right * (1 + 1e-12)


def test_lemma_c3_is_tight_for_many_small_steps():
    left, right = theory.matrix_potential(torch.ones(10_000, 1, 1, dtype=torch.float64))
    # Σ 1/√t = 2√T + ζ(½) + O(T^{-1/2})
    assert left.item() == pytest.approx(200 - 1.4603545, abs=0.01) and right.item() == 200


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES))
def test_lemma_c5(seed, shape):
    rng = np.random.default_rng(seed)
    gradients, radius = rng.standard_normal((6, *shape)), 1.5
    actions = ball_points(rng, 6, shape, radius)
    comparator = ball_points(rng, 1, shape, radius)[0]
    rows, columns = grams(gradients)
    lefts, rights = [power(m, 0.25) for m in rows], [power(n, 0.25) for n in columns]

    def distance(x, i):
        return np.trace((x - comparator).T @ lefts[i] @ (x - comparator) @ rights[i])

    drift = distance(actions[0], 0) + sum(
        distance(x, t) - distance(x, t - 1) for t, x in enumerate(actions) if t
    )
    sides = theory.shampoo_distance_term(
        torch.from_numpy(gradients),
        torch.from_numpy(actions),
        torch.from_numpy(comparator),
        radius=radius,
    )
    expected = 4 * radius**2
    expected *= np.linalg.norm(lefts[-1], 2) * np.trace(rights[-1]) + np.linalg.norm(
        rights[-1], 2
    ) * np.trace(lefts[-1])
    # a rank-deficient Gram's zero eigenvalues, ~1e-16 in size, have fourth roots near 1e-4
    assert sides.right.item() == pytest.approx(expected, rel=5e-3)
    assert sides.left.item() == pytest.approx(drift, rel=1e-6, abs=1e-6)
    assert sides.left <= sides.right


def ogd_game(rng, eta, noise, rounds=300, n=4, radius=1.0):
    """One-sided Shampoo on 1×n, where the projection is radial; `noise` spoils the solution."""
    x, gradients, actions, gaps, square = np.zeros(n), [], [], 0.0, 0.0
    for _ in range(rounds):
        direction = x if np.linalg.norm(x) > 1e-3 else rng.standard_normal(n)
        gradient = direction / np.linalg.norm(direction) + 0.3 * rng.standard_normal(n)
        gradients.append(gradient)
        actions.append(x)
        square += gradient @ gradient
        weight = math.sqrt(square) / eta
        y = x - gradient / weight
        y *= min(1.0, radius / np.linalg.norm(y))
        y = y + noise * rng.standard_normal(n)
        y *= min(1.0, radius / np.linalg.norm(y))
        slope = gradient + weight * (y - x)
        gaps += slope @ y + radius * np.linalg.norm(slope)
        x = y
    gradients, actions = np.stack(gradients)[:, None, :], np.stack(actions)[:, None, :]
    regret = np.sum(gradients * actions) + radius * np.linalg.norm(gradients.sum(0))
    return gradients, actions, regret, gaps


@pytest.mark.parametrize("eta", [0.3, math.sqrt(2), 5.0])
def test_proposition_c2_and_one_sided_shampoo_on_vectors(eta):
    gradients, actions, regret, _ = ogd_game(np.random.default_rng(0), eta, noise=0.0)
    squares = np.cumsum(np.sum(gradients**2, (1, 2)))
    total = gradients.sum(0)
    comparator = -total / np.linalg.norm(total)
    left = torch.from_numpy(np.sqrt(squares)[:, None, None])
    right = torch.eye(4, dtype=torch.float64).expand(len(gradients), 4, 4)
    tensors = [torch.from_numpy(a) for a in (gradients, actions, comparator)]
    sides = theory.mirror_descent_regret(*tensors, left, right, eta=eta)
    assert sides.left.item() == pytest.approx(regret, rel=1e-9)
    away = np.sum((actions - comparator) ** 2, (1, 2))
    drift = np.sqrt(squares[0]) * away[0] + np.sum(np.diff(np.sqrt(squares)) * away[1:])
    energy = np.sum(np.sum(gradients**2, (1, 2)) / np.sqrt(squares))
    assert sides.right.item() == pytest.approx(drift / (2 * eta) + eta / 2 * energy, rel=1e-9)
    assert sides.left <= sides.right
    bound = theory.one_sided_shampoo_bound(torch.tensor([[squares[-1]]]), radius=1.0, eta=eta)
    assert sides.right <= bound
    # actions that are not the algorithm's need not obey it: always the worst point
    worst = torch.from_numpy(gradients / np.linalg.norm(gradients, axis=2, keepdims=True))
    spoiled = theory.mirror_descent_regret(tensors[0], worst, tensors[2], left, right, eta=eta)
    if eta == math.sqrt(2):
        assert spoiled.left > spoiled.right


@pytest.mark.parametrize("noise", [0.0, 0.05, 3.0])
def test_one_sided_shampoo_carries_the_gaps(noise):
    gradients, _, regret, gaps = ogd_game(np.random.default_rng(1), math.sqrt(2), noise)
    gram = torch.tensor([[float(np.sum(gradients**2))]], dtype=torch.float64)
    assert regret <= theory.one_sided_shampoo_bound(gram, radius=1.0, gaps=float(gaps)).item()


def test_one_sided_shampoo_without_its_gaps_is_broken():
    # The "solver" returns the point the adversary likes, so the gap is of the size of the loss.
    rounds = 200
    regret, square, gaps = 2.0 * rounds - 1.0, float(rounds), 0.0
    for t in range(1, rounds):
        weight = math.sqrt(t) / math.sqrt(2)
        x, y = (0.0 if t == 1 else 1.0), 1.0  # g = 1 in every round
        slope = 1 + weight * (y - x)
        gaps += slope * y + abs(slope)
    gram = torch.tensor([[square]], dtype=torch.float64)
    assert regret > theory.one_sided_shampoo_bound(gram, radius=1.0).item()
    assert regret <= theory.one_sided_shampoo_bound(gram, radius=1.0, gaps=gaps).item()


# ---- the bounds --------------------------------------------------------------------------------


def test_bounds_by_hand():
    gram = torch.diag(torch.tensor([1.0, 16.0], dtype=torch.float64))  # quarter roots 1, 2
    columns = torch.diag(torch.tensor([16.0, 1.0, 0.0], dtype=torch.float64))  # 2, 1, 0
    one_sided = theory.one_sided_shampoo_bound(gram, radius=3.0)
    assert one_sided.item() == pytest.approx(2 * math.sqrt(2) * 3 * 5)
    other = theory.one_sided_shampoo_bound(gram, radius=3.0, eta=2.0, epsilon=9.0)
    root = math.sqrt(10) + 5
    assert other.item() == pytest.approx(2 * 9 / 2 * root + 2 * (root - 2 * 3))
    shampoo = theory.shampoo_bound(gram, columns, radius=3.0)
    assert shampoo.item() == pytest.approx(math.sqrt(2) * 3 * (2 * 3 + 3 * 2 + 5))
    lifted = theory.shampoo_bound(gram, columns, radius=3.0, eta=2.0, epsilon=9.0, gaps=0.25)
    left, right = [10**0.25, 25**0.25], [25**0.25, 10**0.25, 9**0.25]
    distance = left[1] * sum(right) + sum(left) * right[0]
    gradient = math.sqrt((math.sqrt(10) + 5 - 6) * (5 + math.sqrt(10) + 3 - 9))
    assert lifted.item() == pytest.approx(9 * distance + 2 * gradient + 0.25)
    original = theory.original_shampoo_bound(gram, columns, radius=3.0, rank=2)
    assert original.item() == pytest.approx(math.sqrt(4) * 2 * 3 * math.sqrt(2) * 3 * 3)


def test_default_eta_is_the_best_for_one_sided_shampoo():
    def bound(eta):
        return theory.one_sided_shampoo_bound(torch.eye(2), radius=1.0, eta=eta).item()

    assert all(bound(None) < bound(eta) for eta in (0.5, 1.2, 1.6, 4.0))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from([(3, 3), (3, 6), (5, 4)]))
def test_the_improved_bound_is_below_the_original(seed, shape):
    gradients = np.random.default_rng(seed).standard_normal((9, *shape))
    rows, columns = (torch.from_numpy(g[-1]) for g in grams(gradients))
    improved = theory.shampoo_bound(rows, columns, radius=1.0)
    original = theory.original_shampoo_bound(rows, columns, radius=1.0, rank=min(shape))
    assert original > 3 * improved


def test_batches_and_refusals():
    rows, columns = torch.eye(2).expand(3, 2, 2), torch.eye(4).expand(3, 4, 4)
    assert theory.shampoo_bound(rows, columns, radius=1.0).shape == (3,)
    assert theory.shampoo_bound(torch.zeros(0, 2, 2), torch.zeros(0, 4, 4), radius=1.0).shape == (
        0,
    )
    with pytest.raises(ValueError, match="column_gram"):
        theory.shampoo_bound(rows, torch.eye(4).expand(2, 4, 4), radius=1.0)
    with pytest.raises(ValueError, match="epsilon"):
        theory.one_sided_shampoo_bound(torch.eye(2), radius=1.0, epsilon=-1.0)
    with pytest.raises(ValueError, match="rank"):
        theory.original_shampoo_bound(torch.eye(2), torch.eye(2), radius=1.0, rank=0)
    with pytest.raises(ValueError, match="must be stacked"):
        theory.matrix_potential(torch.ones(2, 3))
    with pytest.raises(ValueError, match="comparator must be"):
        theory.shampoo_distance_term(
            torch.ones(4, 2, 3), torch.ones(4, 2, 3), torch.ones(3, 2), radius=1.0
        )
