"""AdaGrad without a bound on the gradients, and the game of vectors on the box."""

import math
from functools import partial
from itertools import product

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
CLIPPING = partial(AdaGradFTRL, offset="clip", dtype=F64)
WAYS = (
    partial(AdaGradOGD, dtype=F64),
    CLIPPING,
    partial(AdaGradFTRL, offset="proximal", dtype=F64),
    partial(AdaGradFTRL, offset="scale-free", dtype=F64),
)
CASES = [*product(WAYS, ("scalar", "diagonal"), ("l2", "linf"))]
CASES += product(WAYS[:3], ("full",), ("l2", "linf"))


def wild(seed, rounds=25, d=4):
    """Gradients over ten orders of magnitude, growing, with coordinates that sleep."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((rounds, 1, d)) * rng.lognormal(0, 4, (rounds, 1, 1))
    return torch.from_numpy(g * (rng.random((rounds, 1, d)) < 0.5))


@settings(max_examples=40, deadline=None)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 10**6))
def test_bounds_that_need_no_delta_hold_on_wild_gradients(case, seed):
    make, preconditioner, ball = case
    learner = make((1, 4), preconditioner=preconditioner, ball=ball)
    actions_of(learner, wild(seed))
    assert learner.certificate().holds


def test_excess_and_delta_by_hand():
    # One dimension; norms 1, 3, 2, 5: running maxima 1, 3, 3, 5, excess (3−1) + (5−3).
    eta, moment = 2.0 / math.sqrt(2), 1 + 1 + 4 + 9
    learner = CLIPPING((1, 1), preconditioner="scalar", ball="l2", radius=2.0)
    actions_of(learner, torch.tensor([1.0, -3.0, 2.0, -5.0], dtype=F64)[:, None, None])
    assert learner.excess == 4.0 and learner.peak == 5.0 and learner.moment == moment
    bound = (4 / (2 * eta) + eta) * math.sqrt(moment) + 5.0 * 4 / (2 * eta) + 4.0 * 4.0
    assert learner.bound().item() == pytest.approx(bound + learner.gaps.item(), rel=1e-12)


def test_a_sleeping_game_of_a_batch_pays_nothing_for_its_first_gradient():
    learner = CLIPPING((2, 1, 2), preconditioner="diagonal")
    first = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]], dtype=F64)
    actions_of(learner, (first, torch.full((2, 1, 2), 3.0, dtype=F64)))
    assert learner.excess.tolist() == [2.0 + 3.0 - 1.0, 0.0]


def test_the_box_ledger_keeps_the_regret_of_the_box():
    rng = np.random.default_rng(5)
    gradients, actions = rng.standard_normal((2, 7, 1, 3))
    ledger = BoxLedger((1, 3), radius=2.0)
    for gradient, action in zip(gradients, actions, strict=True):
        ledger.record(torch.from_numpy(gradient), torch.from_numpy(action))
    x = cp.Variable(3)
    best = cp.Problem(cp.Minimize(gradients.sum((0, 1)) @ x), [cp.norm(x, "inf") <= 2.0]).solve()
    assert ledger.regret().item() == pytest.approx(np.sum(gradients * actions) - best, abs=1e-6)
