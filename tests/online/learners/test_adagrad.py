"""AdaGrad on vectors, step for step against cvxpy, and under the bounds of Table 2."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import actions_of
from nucleon.online.learners.adagrad import AdaGradFTRL, AdaGradOGD
from nucleon.online.regret import BoxLedger

F64 = torch.float64
PRECONDITIONERS = ("scalar", "diagonal", "full")
OFFSETS = ("stated", "clip", "scale-free", "proximal")
WAYS = ("ogd", *OFFSETS)
CASES = [
    (way, preconditioner, ball)
    for way in WAYS
    for preconditioner in PRECONDITIONERS
    for ball in ("l2", "linf")
    if (way, preconditioner) != ("scale-free", "full")
]


def build(way, shape, *, bound=1.0, **options):
    options = {"dtype": F64, **options}
    if way == "ogd":
        return AdaGradOGD(shape, **options)
    return AdaGradFTRL(shape, offset=way, delta=bound if way == "stated" else None, **options)


def wild(seed, rounds=25, d=4):
    """Gradients over ten orders of magnitude, growing, with coordinates that sleep."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((rounds, 1, d)) * rng.lognormal(0, 4, (rounds, 1, 1))
    return torch.from_numpy(g * (rng.random((rounds, 1, d)) < 0.5))


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from([case for case in CASES if case[0] != "stated"]),
    seed=st.integers(0, 10**6),
)
def test_bounds_that_need_no_delta_hold_on_wild_gradients(case, seed):
    way, preconditioner, ball = case
    learner = build(way, (1, 4), preconditioner=preconditioner, ball=ball)
    actions_of(learner, wild(seed))
    assert learner.certificate().holds


# ---- every step, solved by cvxpy ---------------------------------------------------------------


def preconditioner_of(kind, met, delta):
    squares = met.T @ met
    if kind == "scalar":
        root = math.sqrt(np.trace(squares)) * np.eye(met.shape[1])
    elif kind == "diagonal":
        root = np.diag(np.sqrt(np.diag(squares)))
    else:
        values, vectors = np.linalg.eigh(squares)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return delta * np.eye(met.shape[1]) + root


def clipped(kind, met):
    """Each gradient cut to the largest norm of those before it, by the definition."""
    kept = [met[0]]
    for t in range(1, len(met)):
        if kind == "diagonal":
            level = np.abs(met[:t]).max()
            kept.append(np.clip(met[t], -level, level))
        else:
            level = np.linalg.norm(met[:t], axis=1).max()
            kept.append(met[t] * min(1.0, level / np.linalg.norm(met[t])))
    return np.stack(kept)


def twin_step(way, kind, ball, met, actions, radius, eta, delta):
    """x_{t+1} by cvxpy from the gradients and actions so far, as the method is defined."""
    size = np.abs(met).max() if kind == "diagonal" else np.linalg.norm(met, axis=1).max()
    if way == "clip":
        met = clipped(kind, met)
    offset = {"stated": delta, "clip": size}.get(way, 0.0)
    metrics = [preconditioner_of(kind, met[:t], offset) for t in range(1, len(met) + 1)]
    x = cp.Variable(met.shape[1])

    def distance(center, metric):
        return cp.quad_form(x - center, cp.psd_wrap(metric)) / (2 * eta)

    if way == "ogd":
        cost = met[-1] @ x + distance(actions[-1], metrics[-1])
    elif way == "proximal":
        before = [np.zeros_like(metrics[0]), *metrics[:-1]]
        terms = zip(actions, metrics, before, strict=True)
        cost = met.sum(0) @ x + sum(distance(a, now - old) for a, now, old in terms)
    else:
        cost = met.sum(0) @ x + distance(0.0, metrics[-1])
    limit = cp.norm(x, 2) if ball == "l2" else cp.norm(x, "inf")
    cp.Problem(cp.Minimize(cost), [limit <= radius]).solve(solver="CLARABEL")
    return x.value


@pytest.mark.parametrize(("way", "preconditioner", "ball"), CASES)
def test_a_step_is_the_program_that_defines_it(way, preconditioner, ball):
    # Four rounds in three dimensions: the last H is positive definite, so x is unique.
    met = np.random.default_rng(4).standard_normal((4, 3)) + 0.4
    met[0] *= 0.3
    met[3] *= 1.5  # above everything before it, so that clipping cuts
    options = {"preconditioner": preconditioner, "ball": ball, "radius": 0.6, "eta": 0.5}
    learner = build(way, (1, 3), bound=5.0, **options)
    *actions, last = actions_of(learner, torch.from_numpy(met[:, None])).numpy()[:, 0]
    expected = twin_step(way, preconditioner, ball, met, actions, 0.6, 0.5, 5.0)
    # λ_min(H)/η ≥ 0.6 here and cvxpy's value is within 1e-8: ‖Δx‖² ≤ 2·1e-8/0.6.
    np.testing.assert_allclose(last, expected, atol=2e-4)


# ---- ways around δ -----------------------------------------------------------------------------


def test_excess_and_delta_by_hand():
    # One dimension; norms 1, 3, 2, 5: running maxima 1, 3, 3, 5, excess (3−1) + (5−3).
    eta, moment = 2.0 / math.sqrt(2), 1 + 1 + 4 + 9
    learner = build("clip", (1, 1), preconditioner="scalar", ball="l2", radius=2.0)
    actions_of(learner, torch.tensor([1.0, -3.0, 2.0, -5.0], dtype=F64)[:, None, None])
    assert learner.excess == 4.0 and learner.peak == 5.0 and learner.moment == moment
    bound = (4 / (2 * eta) + eta) * math.sqrt(moment) + 5.0 * 4 / (2 * eta) + 4.0 * 4.0
    assert learner.bound().item() == pytest.approx(bound + learner.gaps.item(), rel=1e-12)


def test_a_sleeping_game_of_a_batch_pays_nothing_for_its_first_gradient():
    learner = build("clip", (2, 1, 2), preconditioner="diagonal")
    first = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]], dtype=F64)
    actions_of(learner, (first, torch.full((2, 1, 2), 3.0, dtype=F64)))
    assert learner.excess.tolist() == [2.0 + 3.0 - 1.0, 0.0]


# ---- the game of vectors -----------------------------------------------------------------------


def test_the_box_ledger_keeps_the_regret_of_the_box():
    rng = np.random.default_rng(5)
    gradients, actions = rng.standard_normal((2, 7, 1, 3))
    ledger = BoxLedger((1, 3), radius=2.0)
    for gradient, action in zip(gradients, actions, strict=True):
        ledger.record(torch.from_numpy(gradient), torch.from_numpy(action))
    x = cp.Variable(3)
    best = cp.Problem(cp.Minimize(gradients.sum((0, 1)) @ x), [cp.norm(x, "inf") <= 2.0]).solve()
    assert ledger.regret().item() == pytest.approx(np.sum(gradients * actions) - best, abs=1e-6)
