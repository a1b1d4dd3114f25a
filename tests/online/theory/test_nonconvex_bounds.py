"""Section 5 and Appendix G: laws, identities, the corrected proposition and the complexities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import conversion
from nucleon.online import theory


@pytest.mark.parametrize(("rounds", "discount"), [(1, 0.5), (7, 0.9), (500, 0.999)])
def test_law_of_tau_and_the_average_s_weights(rounds, discount):
    law = theory.tau_law(rounds, discount).numpy()
    np.testing.assert_allclose(law, conversion.law_of_tau(rounds, discount), rtol=1e-11)
    assert law.sum() == pytest.approx(1, rel=1e-12)
    weights = theory.ewa_weights(rounds, discount).numpy()
    path = np.random.default_rng(0).standard_normal((rounds, 1))
    np.testing.assert_allclose(weights @ path, conversion.average(path, discount), rtol=1e-9)


@pytest.mark.parametrize("discount", [0.5, 0.9, 0.99])
def test_lemma_g3_by_monte_carlo(discount):
    # the worst case moves by D·Exp(1) in one direction; 2,000 paths, five standard errors
    radius, rounds, paths = 0.7, 300, 2000
    rng = np.random.default_rng(0)
    walk = np.cumsum(radius * rng.exponential(size=(paths, rounds)), 1)
    weights = theory.ewa_weights(rounds, discount).numpy()
    mean = walk @ weights
    distance = np.abs(walk - mean[:, None]) @ weights
    bound = theory.ewa_distance_bound(radius=radius, discount=discount)
    assert bound == pytest.approx(2 * discount * radius / (1 - discount))
    error = 5 * distance.std() / math.sqrt(paths)
    # geometric ages of mean γ/(1−γ) deviate from it by at least half of that, up to discretization
    assert bound / 4 < distance.mean() <= bound + error
    reach = theory.ewa_distance_bound(
        radius=theory.o2nc_radius(rho=2.5, discount=discount), discount=discount
    )
    assert reach == pytest.approx(2.5)  # the radius is chosen to make it ρ


def test_the_first_term_needs_its_factor():
    """On a clipped linear loss the printed first term fails and the corrected one holds.

    L(w) = max(w, edge) in one dimension, X_t = −D always, no noise, regret 0. The smallest
    P(Y > edge) over laws with mean w and E|Y − w| ≤ ρ is 1 − ρ/(2(w − edge)).
    """
    discount, rho, rounds, paths = 0.99, 1.0, 40_000, 20
    radius = theory.o2nc_radius(rho=rho, discount=discount)
    rng = np.random.default_rng(1)
    walk = -np.cumsum(radius * rng.exponential(size=(paths, rounds)), 1)
    edge = walk.min() - 10 * rho
    averages, running = np.zeros_like(walk), np.zeros(paths)
    for t in range(rounds):
        running = discount * running + (1 - discount) * walk[:, t]
        averages[:, t] = running / (1 - discount ** (t + 1))
    gap = np.clip(1 - rho / (2 * (averages - edge)), 0, None)
    left = float((gap @ theory.tau_law(rounds, discount).numpy()).mean())
    zeros = torch.zeros(rounds)
    bound = theory.o2nc_bound(
        loss_gap=-edge, rho=rho, discount=discount, regrets=zeros, noises=zeros
    )
    printed = -edge / ((1 - discount) * rho * rounds)
    assert bound.descent == pytest.approx(2 * discount * printed)
    assert printed < 0.6 and left > 0.95
    assert left <= bound.total == bound.descent


def test_o2nc_terms_by_hand():
    bound = theory.o2nc_bound(
        loss_gap=3.0,
        rho=2.0,
        discount=0.5,
        regrets=torch.tensor([1.0, 2.0, 4.0]),
        noises=torch.tensor([0.5, 0.0, 1.0]),
    )
    assert bound.descent == pytest.approx(2 * 0.5 * 3 / (0.5 * 2 * 3))
    assert bound.regret == pytest.approx((4 + 0.5 * 3) / 3)
    assert bound.noise == pytest.approx((1 + 0.5 * 0.5) / 3)
    assert bound.total == pytest.approx(bound.descent + bound.regret + bound.noise)


GIVEN = {"rho": 0.5, "epsilon": 0.1, "q_nuclear": 3.0, "loss_gap": 2.0, "gradient_bound": 1.0}


def test_leon_complexity_by_hand():
    plan = theory.leon_complexity(rows=4, **GIVEN)
    assert plan.discount == pytest.approx(1 - 1 / 360_000, rel=1e-15)  # (0.1/60)²
    assert plan.radius == pytest.approx((1 / 360_000) * 0.5 / 2 / plan.discount)
    assert plan.terms["descent"] == pytest.approx(4000 * 9 * 2 / (0.5 * 0.001))
    assert plan.terms["regret"] == pytest.approx(400 * 9 / 0.01)
    assert plan.terms["gradient_bound"] == pytest.approx(10 * math.sqrt(2) * 4 / 0.1)
    assert plan.rounds == pytest.approx(144_000_000, abs=1)
    assert plan.valid


def test_pion_pays_its_factor():
    pion = theory.pion_complexity(rows=4, width=10, **GIVEN)
    expected = conversion.plan(rows=4, factor=(10 / 5) ** 0.25, **GIVEN)
    assert 1 - pion.discount == pytest.approx(1 - expected.discount, rel=1e-9)
    assert pion.radius == pytest.approx(expected.radius, rel=1e-9)
    assert pion.rounds == pytest.approx(expected.rounds, abs=1)


@settings(max_examples=60, deadline=None)
@given(
    rho=st.floats(0.01, 10),
    relative=st.floats(0.001, 10),
    q_nuclear=st.floats(0.01, 100),
    loss_gap=st.floats(0, 100),
    gradient_bound=st.floats(0, 100),
    rows=st.integers(1, 8),
    extra=st.integers(2, 50),
)
def test_the_plan_reaches_epsilon(rho, relative, q_nuclear, loss_gap, gradient_bound, rows, extra):
    epsilon = relative * q_nuclear
    shared = {"rho": rho, "q_nuclear": q_nuclear, "loss_gap": loss_gap}
    shared |= {"gradient_bound": gradient_bound, "rows": rows}
    pion = theory.pion_complexity(epsilon=epsilon, width=rows + extra, **shared)
    leon = theory.leon_complexity(epsilon=epsilon, **shared)
    constants = 2 * math.sqrt(2) * theory.ftpl_factor(rows, rows + extra), 2.0
    for plan, constant in zip((pion, leon), constants, strict=True):
        reached = theory.stationarity_bound(
            discount=plan.discount, rounds=plan.rounds, regret_constant=constant, **shared
        )
        if plan.valid:
            assert reached.total <= epsilon * (1 + 1e-9)
        assert plan.rounds >= max(plan.terms.values())


def test_conditions_are_named():
    loud = theory.leon_complexity(rows=4, **{**GIVEN, "gradient_bound": 1000.0})
    assert not loud.conditions["gradient_bound_small"] and loud.conditions["discount_at_least_half"]
    large = theory.leon_complexity(rows=4, **{**GIVEN, "epsilon": 45.0, "gradient_bound": 0.01})
    assert not large.conditions["discount_at_least_half"] and not large.valid
    assert large.conditions["gradient_bound_small"]
    edge = theory.leon_complexity(rows=4, **{**GIVEN, "epsilon": 30 * math.sqrt(2) * (1 - 1e-12)})
    assert edge.conditions["discount_at_least_half"] and edge.discount == pytest.approx(0.5)
