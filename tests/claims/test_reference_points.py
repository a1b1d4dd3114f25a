"""The reference's curvature, promises and ratios at a point, by other means."""

import math

import numpy as np
import pytest

from nucleon.claims.oracle import algebra, conversion, curvature, definition


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("running", [False, True])
def test_the_regret_of_curvature_is_that_of_its_losses(running):
    """Slopes by finite differences, and the worst B by its eigenvectors."""
    mu, L, n = 0.5, 3.0, 3
    hessian = np.diag([0.5, 1.0, 3.0])
    pairs = [(s, hessian @ s) for s in normal(4, 6, n)]
    game = curvature.play(pairs, mu=mu, L=L, running=running)
    slopes, basis = np.zeros((6, n, n)), np.eye(n * n).reshape(n * n, n, n)
    for t, (pair, b) in enumerate(zip(pairs, game.matrices, strict=True)):
        for e in basis:
            even = (e + e.T) / 2  # the derivative along symmetric matrices
            ends = (curvature.loss(pair, b + h * even) for h in (0.5, -0.5))  # exact: a quadratic
            slopes[t] += np.subtract(*ends) * e
    values, vectors = np.linalg.eigh(slopes.sum(0))
    best = (vectors * np.where(values > 0, mu, L)) @ vectors.T
    paid = sum(algebra.inner(g, b - best) for g, b in zip(slopes, game.matrices, strict=True))
    assert game.regret == pytest.approx(paid) and 0 < game.regret <= game.bound
    losses = [curvature.loss(p, b) for p, b in zip(pairs, game.matrices, strict=True)]
    assert game.loss == pytest.approx(sum(losses)) and game.loss <= game.regret
    np.testing.assert_allclose(game.matrices[0], (mu + L) / 2 * np.eye(n))


def test_what_is_promised_are_the_terms_of_the_proposition():
    """Zero gradients leave the descent; a constant v has the weights (v + (1−γ)(T−1)v)/T."""
    found = conversion.TheoremPlan(0.9, conversion.radius(2.0, 0.9), 7)
    known = {"q_nuclear": 3.0, "loss_gap": 5.0, "gradient_bound": 0.4, "rows": 2, "constant": 2.0}
    descent, regret, noise = conversion.promised(found, **known)
    none = np.zeros((7, 2, 3))
    right = conversion.proposition(none, none, none, rho=2.0, discount=0.9, fall=np.array(5.0))[1]
    assert descent == pytest.approx(float(right))
    share, q = (1 + 0.1 * 6) / 7, 3.0 / math.sqrt(1 - 0.9**2)
    assert (regret, noise) == pytest.approx((share * 2 * (q + 2 * 0.4 / 0.9), share * q))


def test_the_ratios_at_a_point_are_those_of_numbers():
    s, root, more = (np.array([[v]]) for v in (0.7, 0.5, 0.9))
    hyperbolic, regularized = definition.hyperbolic(), definition.regularized()
    found = definition.stability(hyperbolic, s, root, more)
    assert found == pytest.approx((math.hypot(0.7, 0.9) - math.hypot(0.7, 0.5)) / 0.4)
    assert np.isnan(definition.stability(hyperbolic, s, more, root)).all()
    # |s| > l: the maximizer is at the edge, |s| − l/2 + l/2; else s²/2l + l/2.
    found = definition.smoothness(regularized, 0.1 * s, root, s - 0.1 * s)
    ahead = 0.7 - (0.07**2 / 1.0 + 0.25) - 0.63 * 0.07 / 0.5
    assert found == pytest.approx(2 * ahead * 0.5 / 0.63**2)
    draws = normal(2, 5, 1, 2)
    found = definition.gaussian(draws).value(s, root)
    np.testing.assert_allclose(
        found, np.hypot(0.7 + 0.5 * draws[:, 0, 0], 0.5 * draws[:, 0, 1]), rtol=1e-12
    )
