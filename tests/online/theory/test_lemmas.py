"""Both sides of the lemmas against the oracle, and where they are tight or fail."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import lemmas, smoothings
from nucleon.claims.oracle.algebra import nuclear, transposed
from nucleon.online import theory

SHAPES = [(1, 1), (1, 4), (3, 3), (2, 5)]
PAIR = (2.0, 0.4)


def streams(rng, shape):
    """Gradients of full rank, of rank one or decaying."""
    gradients = rng.standard_normal((7, *shape))
    kind = rng.integers(3)
    if kind == 1:
        gradients = rng.standard_normal((7, shape[0], 1)) @ rng.standard_normal((1, shape[1]))
    return gradients * 0.5 ** np.arange(7)[:, None, None] if kind == 2 else gradients


def ball(rng, *shape):
    points = rng.standard_normal(shape)
    return 1.5 * points / np.linalg.norm(points, 2, axis=(-2, -1), keepdims=True)


def points(rng, shape):
    return rng.standard_normal((6, *shape)), ball(rng, 6, *shape), ball(rng, *shape)


def descents(rng, shape):
    gradients, actions, comparator = points(rng, shape)
    left = np.cumsum(gradients @ transposed(gradients), 0) + np.eye(shape[0])
    return gradients, actions, comparator, left, np.stack([np.eye(shape[1])] * 6)


def directions(rng, shape):
    """X with singular values from 1 to 3, equal ones among them, and a unit direction."""
    u, _, v = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    values = rng.uniform(1, 3, shape[0]) if rng.integers(2) else np.full(shape[0], 2.0)
    direction = rng.standard_normal(shape)
    return u @ np.diag(values) @ v, direction / np.linalg.norm(direction)


def roots(rng, shape):
    factor = rng.standard_normal((shape[0], shape[0]))
    return rng.standard_normal(shape), factor @ factor.T + 0.01 * np.eye(shape[0])


def remark(gradients):
    return np.linalg.norm(gradients), nuclear(gradients.reshape(7, -1))


def full_against_scalar(gradients):
    rows = gradients.flatten(1)
    return theory.full_against_scalar(rows.mT @ rows)


LEMMAS = {
    # A change of the cutoff of nearly singular Grams turns the sums by √eps at worst.
    "C.3": (streams, theory.matrix_potential, lemmas.matrix_potential, {"rel": 1e-6}),
    "C.3, columns": (
        streams,
        lambda gradients: theory.matrix_potential(gradients.mT),
        lambda gradients: lemmas.matrix_potential(transposed(gradients)),
        {"rel": 1e-6},
    ),
    "C.4": (streams, theory.shampoo_gradient_term, lemmas.gradient_term, {"rel": 1e-6}),
    # The zero eigenvalues of a deficient Gram, ~1e-16, have fourth roots near 1e-4, which the
    # oracle leaves out; they enter the drift times ‖X_t − X‖² ≤ 9.
    "C.5": (
        points,
        lambda *tensors: theory.shampoo_distance_term(*tensors, radius=1.5),
        lambda *arrays: lemmas.distance_term(*arrays, radius=1.5),
        {"rel": 5e-3, "abs": 2e-3},
    ),
    "C.2": (
        descents,
        lambda *tensors: theory.mirror_descent_regret(*tensors, eta=0.7),
        lambda *arrays: lemmas.mirror_descent(*arrays, eta=0.7),
        {"rel": 1e-9},
    ),
    # Fourth-order central difference: truncation h⁴·O(1), rounding 1e-15·‖X‖_*·16/h² ≈ 1e-7.
    "E.1": (
        directions,
        theory.nuclear_hessian,
        lambda *arrays: (lemmas.hessian(*arrays), lemmas.hessian_bound(*arrays)),
        {"abs": 1e-6},
    ),
    # The zero eigenvalues of a deficient Gram are ±1e-15, their roots 3e-8 each.
    "B.2": (streams, full_against_scalar, remark, {"abs": 1e-6}),
    "3.3": (
        roots,
        lambda x, root: theory.admissibility_tradeoff(x, root, alpha=PAIR[0], beta=PAIR[1]),
        lambda x, root: (nuclear(x), smoothings.ceiling(x, root, PAIR)),
        {"rel": 1e-9},
    ),
}


@pytest.mark.parametrize("name", LEMMAS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), shape=st.sampled_from(SHAPES))
def test_both_sides_are_those_of_the_oracle(name, seed, shape):
    draw, ours, oracle, tolerance = LEMMAS[name]
    arrays = draw(np.random.default_rng(seed), shape)
    arrays = arrays if isinstance(arrays, tuple) else (arrays,)
    sides = ours(*map(torch.from_numpy, arrays))
    assert [side.item() for side in sides] == pytest.approx(list(oracle(*arrays)), **tolerance)
    if name != "C.2":  # which needs the actions of the algorithm
        assert sides.left <= sides.right * (1 + 1e-9)


def test_proposition_c2_needs_the_algorithm():
    """Actions that are always the worst point need not obey it."""
    row = np.random.default_rng(0).standard_normal((6, 1, 4))
    worst = row / np.linalg.norm(row, axis=2, keepdims=True)
    total = -row.sum(0) / np.linalg.norm(row.sum(0))
    weights = np.sqrt(np.cumsum((row**2).sum((1, 2))))[:, None, None]
    arrays = row, worst, total, weights, np.stack([np.eye(4)] * 6)
    spoiled = theory.mirror_descent_regret(*map(torch.from_numpy, arrays), eta=math.sqrt(2))
    assert spoiled.left > spoiled.right


@pytest.mark.parametrize("noncentrality", [0.0, 1e-6, 1.0, 100.0, 1e6])
def test_inverse_chi_square_in_closed_form(noncentrality):
    left, right = theory.inverse_chi_square(4, noncentrality)
    closed = -math.expm1(-noncentrality / 2) / noncentrality if noncentrality else right.item()
    # exp of a log of size λ/2·log λ loses that many roundings
    assert left.item() == pytest.approx(closed, rel=1e-15 * (10 + 20 * noncentrality))
