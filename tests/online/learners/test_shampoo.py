"""Shampoo and Kronecker FTRL alone, against NumPy on vec X."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import actions_of, ledger_of, nuclear, operator, polar
from nucleon.claims.oracle import learners as oracle
from nucleon.online import streams
from nucleon.online.learners.shampoo import KroneckerFTRL, OneSidedShampoo, Shampoo

F64 = torch.float64
POWERS = {OneSidedShampoo: (0.5, 0.0), Shampoo: (0.25, 0.25), KroneckerFTRL: (0.25, 0.25)}
PROJECTED = list(POWERS)
DESCENT = [OneSidedShampoo, Shampoo]


def gradients_of(rounds, shape, seed=0, scale=1.0):
    """Gradients with a drift, so that the constraint binds, of operator norm at most `scale`."""
    g = np.random.default_rng(seed).standard_normal((rounds, *shape)) + 0.5
    return torch.from_numpy(g * (scale / np.linalg.svd(g, compute_uv=False).max()))


def roots(kind, gradients, epsilon=0.0):
    """L_t and R_t of the gradients so far, by the oracle."""
    return oracle._roots(gradients, POWERS[kind], epsilon)


def vec(x):
    """Columns stacked."""
    return x.T.reshape(-1)


# ---- one step, solved by others ----------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    rounds=st.integers(1, 5),
    epsilon=st.sampled_from([0.0, 0.1]),
    kind=st.sampled_from(DESCENT),
    seed=st.integers(0, 99),
)
def test_without_projection_it_is_descent_on_vec_x_in_the_kronecker_metric(
    shape, rounds, epsilon, kind, seed
):
    eta, g = 0.3, np.random.default_rng(seed).standard_normal((rounds, *shape))
    learner = kind(shape, eta=eta, epsilon=epsilon, projection="none", dtype=F64)
    flip = shape[0] > shape[1]
    x = np.zeros(shape[0] * shape[1])
    action = actions_of(learner, torch.from_numpy(g))[-1].numpy()
    for t in range(1, rounds + 1):
        seen = np.swapaxes(g[:t], 1, 2) if flip else g[:t]
        metric = np.kron(*reversed(roots(kind, seen, epsilon)))
        x = x - eta * np.linalg.pinv(metric, rcond=1e-6, hermitian=True) @ vec(seen[-1])
    expected = x.reshape(seen.shape[2], seen.shape[1]).T
    # A nonzero eigenvalue of M is rarely under 1e-6 of the largest: its root loses six digits.
    np.testing.assert_allclose(
        action, expected.T if flip else expected, atol=1e-8 * (1 + np.abs(x).max())
    )


@pytest.mark.parametrize("kind", DESCENT)
def test_rounding_is_no_direction_of_the_pseudo_inverse(kind):
    # G_t = s_t·uvᵀ: both preconditioners are √Σs² on uvᵀ, and x_{t+1} = x_t − η·s_t/√Σs²·uvᵀ. What
    # rounding leaves of the zero eigenvalues has a root of 1e-8, and would add as much a round.
    rng = np.random.default_rng(0)
    u, v = (a / np.linalg.norm(a) for a in (rng.standard_normal(n) for n in (6, 8)))
    signs, eta = rng.uniform(-1, 1, 40), 0.3
    learner = kind((6, 8), eta=eta, projection="none", dtype=F64)
    gradients = torch.from_numpy(signs[:, None, None] * np.outer(u, v))
    action = actions_of(learner, gradients)[-1].numpy()
    length = -eta * np.sum(signs / np.sqrt(np.cumsum(signs**2)))
    # Forty steps of length ≤ η, each to some ten rounding errors.
    np.testing.assert_allclose(action, length * np.outer(u, v), atol=1e-13)


# ---- the bounds --------------------------------------------------------------------------------


def test_the_kronecker_penalty_is_the_largest_over_the_ball():
    # Σλ_i(L)λ_i(R) is attained by aligned singular vectors, and by no random X exceeded.
    rng, g = np.random.default_rng(3), gradients_of(6, (2, 3)).numpy()
    learner = KroneckerFTRL((2, 3), dtype=F64, radius=1.3, eta=0.9)
    actions_of(learner, torch.from_numpy(g))
    left, right = roots(KroneckerFTRL, g, 1.0)
    root_traces = [
        np.sqrt(np.maximum(np.linalg.eigvalsh(a), 0)).sum()
        for a in (np.einsum("tij,tkj->ik", g, g), np.einsum("tij,tik->jk", g, g))
    ]
    rest = 0.9 * math.sqrt(root_traces[0] * root_traces[1]) + learner.gaps.item()
    penalty = learner.bound().item() - rest
    (_, u), (_, v) = np.linalg.eigh(left), np.linalg.eigh(right)
    best = 1.3 * u[:, ::-1] @ v[:, ::-1][:, :2].T

    def cost(x):
        return np.trace(x.T @ left @ x @ right) / (2 * 0.9)

    assert cost(best) == pytest.approx(penalty, rel=1e-6)
    assert all(
        cost(1.3 * polar(rng.standard_normal((2, 3)))) <= penalty * (1 + 1e-9) for _ in range(300)
    )


@pytest.mark.parametrize("kind", PROJECTED)
def test_the_gaps_of_a_poor_solver_are_in_the_bound(kind):
    gradients = gradients_of(12, (3, 4))
    options = {"solver": "frank-wolfe", "max_iterations": 1, "radius": 0.5}
    learner, eta = kind((3, 4), dtype=F64, **options), 0.5 * kind.default_eta
    actions, gaps, g = actions_of(learner, gradients).numpy(), 0.0, gradients.numpy()
    for t, x in enumerate(actions[1:], start=1):
        if kind is KroneckerFTRL:
            left, right = roots(kind, g[:t], 1.0)
            slope = g[:t].sum(0) + left @ x @ right / eta
        else:
            left, right = roots(kind, g[:t])
            slope = g[t - 1] + left @ (x - actions[t - 1]) @ right / eta
        gaps += np.sum(slope * x) + 0.5 * nuclear(slope)
    assert learner.gaps.item() == pytest.approx(gaps, rel=1e-6) and gaps > 1e-3
    exact = kind((3, 4), dtype=F64, radius=0.5)
    actions_of(exact, gradients)
    assert learner.bound() - learner.gaps == pytest.approx((exact.bound() - exact.gaps).item())
    assert learner.certificate().holds


# ---- without the projection --------------------------------------------------------------------


@pytest.mark.parametrize("kind", DESCENT)
def test_without_the_projection_it_leaves_the_ball_and_its_bound(kind):
    # E for half of the rounds, then −E: the unconstrained iterate is 2√T away and must come back,
    # a regret of order T^{3/2}, where the projected one turns around at the border.
    rounds, direction = 60, torch.eye(2, 3, dtype=F64)
    signs = [1.0] * (rounds // 2) + [-1.0] * (rounds // 2)
    stream = streams.replay(torch.stack([s * direction for s in signs]))
    free, projected = kind((2, 3), projection="none", dtype=F64), kind((2, 3), dtype=F64)
    ledger_of(free, stream, rounds // 2)
    assert operator(free.play()) > 5
    ledger_of(free, stream, rounds // 2)
    refused = free.certificate()
    assert not refused.holds and refused.bound.isinf() and "projection" in str(refused.refusal)
    ledger_of(projected, stream, rounds)
    kept = projected.certificate()
    assert kept.holds and refused.regret > 1.2 * kept.bound > 0
