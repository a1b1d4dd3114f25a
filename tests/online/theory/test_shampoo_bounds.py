"""Appendix C: the lemmas against the oracle, the bounds by hand; the learners' tests play them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import bounds, gradient_sums
from nucleon.claims.oracle.algebra import moments, transposed
from nucleon.online import theory

SHAPES = [(1, 1), (1, 4), (4, 1), (3, 3), (2, 5)]


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
    tensor = torch.from_numpy(gradients)
    for sides, expected in (
        (theory.matrix_potential(tensor), gradient_sums.matrix_potential(gradients)),
        (theory.matrix_potential(tensor.mT), gradient_sums.matrix_potential(transposed(gradients))),
        (theory.shampoo_gradient_term(tensor), gradient_sums.gradient_term(gradients)),
    ):
        assert [side.item() for side in sides] == pytest.approx(list(expected), rel=LOOSE)
        assert sides.left <= sides.right * (1 + 1e-12)


def test_lemma_c3_is_tight_for_many_small_steps():
    left, right = theory.matrix_potential(torch.ones(10_000, 1, 1, dtype=torch.float64))
    # Σ 1/√t = 2√T + ζ(½) + O(T^{-1/2})
    assert left.item() == pytest.approx(200 - 1.4603545, abs=0.01) and right.item() == 200


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES))
def test_lemma_c5(seed, shape):
    rng = np.random.default_rng(seed)
    gradients, radius = rng.standard_normal((6, *shape)), 1.5
    actions, comparator = ball_points(rng, 6, shape, radius), ball_points(rng, 1, shape, radius)[0]
    arrays = gradients, actions, comparator
    drift, bound = gradient_sums.distance_term(*arrays, radius=radius)
    sides = theory.shampoo_distance_term(*map(torch.from_numpy, arrays), radius=radius)
    # A rank-deficient Gram's zero eigenvalues, ~1e-16 in size, have fourth roots near 1e-4, which
    # the oracle leaves out; they enter the drift times ‖X_t − X‖² ≤ 9.
    assert sides.right.item() == pytest.approx(bound, rel=5e-3)
    assert sides.left.item() == pytest.approx(drift, rel=1e-6, abs=2e-3)
    assert sides.left <= sides.right


def test_proposition_c2_is_an_identity_of_its_sums_and_needs_the_algorithm():
    rng = np.random.default_rng(0)
    gradients, actions = rng.standard_normal((6, 2, 4)), ball_points(rng, 6, (2, 4), 1.0)
    comparator = ball_points(rng, 1, (2, 4), 1.0)[0]
    left = np.cumsum(gradients @ transposed(gradients), 0) + np.eye(2)
    right = np.broadcast_to(np.eye(4), (6, 4, 4)).copy()
    arrays = gradients, actions, comparator, left, right
    sides = theory.mirror_descent_regret(*map(torch.from_numpy, arrays), eta=0.7)
    expected = gradient_sums.mirror_descent(*arrays, eta=0.7)
    assert [side.item() for side in sides] == pytest.approx(list(expected), rel=1e-9)
    # Actions that are not the algorithm's need not obey it: always the worst point.
    row = gradients[:, :1]
    worst = row / np.linalg.norm(row, axis=2, keepdims=True)
    total = -row.sum(0) / np.linalg.norm(row.sum(0))
    weights = np.sqrt(np.cumsum((row**2).sum((1, 2))))[:, None, None]
    arrays = row, worst, total, weights, right
    spoiled = theory.mirror_descent_regret(*map(torch.from_numpy, arrays), eta=math.sqrt(2))
    assert spoiled.left > spoiled.right


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


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from([(3, 3), (3, 6), (5, 4)]))
def test_the_improved_bound_is_below_the_original(seed, shape):
    gradients = np.random.default_rng(seed).standard_normal((9, *shape))
    rows, columns = (torch.from_numpy(moments(g)[1]) for g in (gradients, transposed(gradients)))
    improved = theory.shampoo_bound(rows, columns, radius=1.0)
    original = theory.original_shampoo_bound(rows, columns, radius=1.0, rank=min(shape))
    assert improved.item() == pytest.approx(bounds.shampoo(gradients, radius=1.0), rel=1e-9)
    expected = bounds.original_shampoo(gradients, radius=1.0, rank=min(shape))
    assert original.item() == pytest.approx(expected, rel=1e-9)
    short = rows if shape[0] <= shape[1] else columns
    one_sided = theory.one_sided_shampoo_bound(short, radius=1.0).item()
    assert one_sided == pytest.approx(bounds.one_sided_shampoo(gradients, radius=1.0), rel=1e-9)
    assert one_sided < theory.one_sided_shampoo_bound(short, radius=1.0, eta=1.2).item()
    assert original > 3 * improved
