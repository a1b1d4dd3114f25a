"""Rotations: the rounding's mean by enumeration, the game against SciPy's Procrustes and NumPy."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes

from nucleon.online.learners import FAML, FTL, FTPL, OneSidedShampoo
from nucleon.online.problems import OnlineRotations, Registration, SignRounding
from strategies import F64, FULL, eps, normal, orthogonal, seeds


def unit(vectors):
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)


def pairs(n, k, seed=0, dtype=F64):
    u, v = unit(normal(2, k, n, seed=seed))
    return u.to(dtype), v.to(dtype)


def inside_ball(n, seed, edge):
    """A matrix of the unit ball; `edge` puts some singular values at 1, others at 0."""
    sigma = torch.rand(n, dtype=F64, generator=torch.Generator().manual_seed(seed))
    sigma = (3 * sigma - 1).clamp(0, 1) if edge else sigma
    return (orthogonal(n, n, seed) * sigma) @ orthogonal(n, n, seed + 1).mT


def enumerate_mean(rounding):
    """Σ over all signs, one matrix at a time."""
    n, mean = len(rounding.sigma), 0.0
    for signs in itertools.product((1.0, -1.0), repeat=n):
        chance = math.prod(
            (1 + s * sigma) / 2 for s, sigma in zip(signs, rounding.sigma.tolist(), strict=True)
        )
        mean = mean + chance * rounding.matrix(torch.tensor(signs, dtype=F64))
    return mean


# ---------------------------------------------------------------------- rounding


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 5), seed=seeds, edge=st.booleans())
def test_the_mean_of_the_rounding_is_the_matrix(n, seed, edge):
    """Every signed matrix is orthogonal and their mean is X, both to a few rounding errors."""
    x = inside_ball(n, seed, edge)
    rounding = SignRounding.of(x)
    torch.testing.assert_close(enumerate_mean(rounding), x, rtol=0, atol=1e-13)
    for special in (False, True):
        drawn = rounding.draw(torch.Generator().manual_seed(seed), special=special)
        torch.testing.assert_close(drawn @ drawn.mT, torch.eye(n, dtype=F64), rtol=0, atol=1e-13)
    assert np.linalg.det(drawn.numpy()) == pytest.approx(1.0, abs=1e-12)


def test_the_signs_have_their_probabilities():
    """20 000 draws of three signs: each mean within 4.5 standard errors √((1−σ²)/N)."""
    sigma = torch.tensor([0.9, 0.5, 0.0], dtype=F64)
    rounding, generator = SignRounding.of(sigma.diag()), torch.Generator().manual_seed(0)
    mean = sum(rounding.draw(generator) for _ in range(20_000)) / 20_000
    error = (mean.diagonal() - sigma).abs() / ((1 - sigma**2) / 20_000).sqrt()
    assert error.max() < 4.5 and mean.fill_diagonal_(0).abs().max() < 1e-12


# ---------------------------------------------------------------------- the game


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    k=st.integers(1, 4),
    rounds=st.integers(1, 12),
    discount=st.sampled_from([1.0, 0.8]),
    dtype=st.sampled_from(FULL),
    seed=seeds,
)
def test_losses_and_regret_are_those_of_the_pairs(n, k, rounds, discount, dtype, seed):
    """Against sums over the pairs in NumPy, float64, and SciPy's Procrustes for the best matrix."""
    learner = OnlineRotations(n, discount=discount, dtype=dtype)
    u, v = (x.reshape(rounds, k, n) for x in pairs(n, k * rounds, seed, dtype))
    mean_squares = 0.0
    for t in range(rounds):
        x = learner.matrix()
        loss = learner.observe(u[t], v[t])
        # For orthogonal R the loss is ½‖v − Ru‖²; for X it is 1 − vᵀXu.
        expected = 1 - np.einsum("ki,ij,kj", *(a.double().numpy() for a in (v[t], x, u[t]))) / k
        assert loss.item() == pytest.approx(expected, abs=16 * math.sqrt(n) * eps(dtype))
        mean_squares = discount * mean_squares + expected
    ages = discount ** np.arange(rounds - 1, -1, -1.0)
    tolerance = 16 * math.sqrt(n) * rounds * eps(dtype)
    weight = np.sqrt(np.repeat(ages, k) / k)[:, None]
    a, b = (weight * x.double().reshape(-1, n).numpy() for x in (u, v))
    result, _ = orthogonal_procrustes(a, b)
    best = 0.5 * np.square(b - a @ result).sum()
    certificate = learner.learner.certificate()
    assert certificate.regret.item() == pytest.approx(mean_squares - best, abs=2 * tolerance)
    assert certificate.holds


@pytest.mark.parametrize("make", [FAML, FTL, FTPL, OneSidedShampoo])
def test_any_learner_of_the_ball_plays(make):
    learner, stream, loss = OnlineRotations(3, make, dtype=F64), Registration(seed=1), 0.0
    for t in range(1, 40):
        loss += learner.observe(*stream.pairs(t), oblivious=True)
    assert learner.learner.certificate().holds == (make is not FTL)
    rotation = learner.rotation(torch.Generator().manual_seed(0), special=True)
    assert torch.linalg.det(rotation).item() == pytest.approx(1.0)
    # Steady scans with 10 % outliers and errors of 0.2: all of them soon beat the blind loss 1.
    assert loss < 0.5 * 39 and rotation.dtype == F64


def test_one_pair_is_a_batch_of_one():
    single, batch = (OnlineRotations(4, dtype=F64) for _ in range(2))
    u, v = pairs(4, 1)
    assert single.observe(u[0], v[0]) == batch.observe(u, v) == 1.0  # X_1 = 0
    assert torch.equal(single.matrix(), batch.matrix())


U, V = pairs(3, 2)


@pytest.mark.parametrize(
    ("u", "v", "error", "message"),
    [
        (2 * U, V, ValueError, "u must hold unit vectors, got lengths from 2 to 2; divide"),
        (U, torch.stack([V[0], 0 * V[1]]), ValueError, "v must .* from 0 to 1; .* drop zeros"),
        (U, V[:1], RuntimeError, "cannot be multiplied"),
        (unit(U[:, :2]), unit(V[:, :2]), ValueError, r"shape \(3, 3\), got \(2, 2\)"),
        (U[None], V[None], ValueError, r"shape \(3, 3\), got \(1, 3, 3\)"),
        (U.float(), V.float(), TypeError, "gradient has dtype torch.float32"),
        (U, V * math.nan, ValueError, "gradient must be finite"),
    ],
)
def test_bad_pairs_are_refused_before_anything_changes(u, v, error, message):
    learner = OnlineRotations(3, dtype=F64)
    learner.observe(U, V)
    learner.matrix()
    before = str(learner.learner.state_dict())
    with pytest.raises(error, match=message):
        learner.observe(u, v)
    assert str(learner.learner.state_dict()) == before


# ---------------------------------------------------------------------- the stream


def test_scans_are_what_their_options_say():
    plain = Registration(noise=0.0, outliers=0.0, points=50, drift=0.01, seed=4)
    for t in (1, 30):
        u, v = plain.pairs(t)
        torch.testing.assert_close(v, u @ plain.rotation(t).mT, rtol=0, atol=1e-14)
        assert torch.equal(plain.pairs(t)[1], v)
    # tr(Q_1ᵀQ_31) of a turn by 0.3 about an axis: 1 + 2cos 0.3.
    turned = (plain.rotation(1).mT @ plain.rotation(31)).trace().item()
    assert turned == pytest.approx(1 + 2 * math.cos(0.3), abs=1e-12)
    assert not torch.equal(plain.pairs(1)[0], plain.pairs(2)[0])
    marked = Registration(markers=True, symmetric=True, noise=0.0, outliers=0.0)
    u, v = marked.pairs(1)
    assert torch.equal(u, marked.pairs(2)[0])
    half = marked.rotation(1).mT @ marked.rotation(2)
    expected = torch.tensor([-1.0, -1, 1], dtype=F64).diag()
    torch.testing.assert_close(half, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: SignRounding.of(torch.eye(3, 4)), ValueError, "square"),
        (lambda: SignRounding.of(torch.eye(3).expand(2, 3, 3)), ValueError, "one square"),
        (lambda: SignRounding.of(1.001 * torch.eye(3)), ValueError, "project_operator_ball"),
        (lambda: SignRounding.of(torch.full((2, 2), math.nan)), ValueError, "finite"),
    ],
)
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
