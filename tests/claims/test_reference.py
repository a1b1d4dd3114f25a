"""The reference itself, by other means; that the claims' checks against it can fail."""

import ast
import math
from fractions import Fraction
from pathlib import Path

import cvxpy
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch

from nucleon.claims import CLAIMS, beside, conversions, optimizers
from nucleon.claims.engine import Check, Row
from nucleon.claims.oracle import (
    algebra,
    bounds,
    conversion,
    costs,
    curvature,
    learners,
    lemmas,
    scalar,
    smoothings,
    twins,
    unknown,
)
from nucleon.online.learners import FAML
from nucleon.online.o2nc import O2NC
from nucleon.optim import Leon

F64 = torch.float64
FOLDER = Path(learners.__file__).parent


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


# ---- that it is independent


def test_it_imports_nothing_but_numpy_and_itself():
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith("nucleon.claims.oracle")
                assert own or not name.startswith(("nucleon", "torch")), (file.name, name)


def test_every_claim_is_held_to_it():
    """Each claim's file imports the reference, or what compares with it."""
    judges = {"optimizers", "conversions", "oracle", "beside"}
    by_identities = {"thm-average", "average-schedule"}  # ours: two forms of each sum, in the file
    for claim in set(CLAIMS) - by_identities:
        file = next(FOLDER.parent.glob(f"*/{claim.replace('-', '_')}.py"))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        used = set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                used |= {*node.module.split("."), *(alias.name for alias in node.names)}
        assert judges & used, claim


# ---- algebra


def test_powers_and_the_solver_against_cvxpy():
    a = normal(0, 3, 3)
    a = a @ a.T + np.eye(3)
    assert algebra.power(a, -0.5) @ algebra.power(a, -0.5) @ a == pytest.approx(np.eye(3))
    singular = np.diag([4.0, 0.0])
    assert algebra.power(singular, -0.5) == pytest.approx(np.diag([0.5, 0.0]))
    c, right = normal(1, 3, 4), np.eye(4) + np.diag([0.0, 1.0, 2.0, 3.0])
    x = cvxpy.Variable((3, 4))
    left = np.linalg.cholesky(a).T
    objective = cvxpy.sum(cvxpy.multiply(c, x)) + cvxpy.sum_squares(left @ x @ np.sqrt(right)) / 2
    cvxpy.Problem(cvxpy.Minimize(objective), [cvxpy.sigma_max(x) <= 0.5]).solve(eps=1e-9)
    largest = np.linalg.eigvalsh(a)[-1] * 4.0
    found = algebra.minimize(c, lambda y: a @ y @ right, largest, algebra.operator_ball(0.5))
    assert np.linalg.norm(found, 2) == pytest.approx(0.5)
    assert found == pytest.approx(x.value, abs=1e-5)


def test_sums_of_a_history_are_the_recursions():
    history, total, gram = normal(2, 5, 2, 3), np.zeros((2, 3)), np.zeros((2, 2))
    for g in history:
        total, gram = 0.9 * total + g, 0.81 * gram + g @ g.T
    found = algebra.moments(history, 0.9)
    assert found[0] == pytest.approx(total) and found[1] == pytest.approx(gram)


# ---- directions, by closed forms and by differentiation


def test_the_directions_are_the_derivatives_of_the_values():
    s, root = normal(3, 2, 4), normal(4, 2, 2)
    level, z = root @ root.T + np.eye(2), normal(5, 6, 2, 4)
    pairs = (
        (smoothings.hyperbolic_value, learners.augmented),
        (smoothings.regularized_value, learners.regularized),
        (smoothings.perturbed_value(lambda t: z), learners.perturbed(lambda t: z)),
    )
    h = 1e-6
    for value, direction in pairs:
        slope = direction(s, level, 0)
        for index in np.ndindex(*s.shape):
            e = np.zeros_like(s)
            e[index] = h
            numeric = (value(s + e, level) - value(s - e, level)) / (2 * h)
            assert slope[index] == pytest.approx(numeric, abs=1e-7)


@pytest.mark.parametrize(("dimension", "error"), [(3, 1e-5), (8, 1e-12)])
def test_the_mean_direction_of_a_row_is_kummers_function(dimension, error):
    s = normal(6, 1, dimension)
    kappa = np.linalg.norm(s) / 0.7
    length = (
        kappa
        / math.sqrt(2)
        * math.exp(math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2 + 1))
        * scipy.special.hyp1f1(0.5, dimension / 2 + 1, -(kappa**2) / 2)
    )
    found = learners.spherical(s, np.array([[0.49]]))
    assert found == pytest.approx(s / np.linalg.norm(s) * length, abs=error)


def test_actions_in_one_dimension_by_hand():
    """FAML −Ds/√(s²+G²+Σg²), FTRL the clipped −Dη·s/√(G²+Σg²), one-sided Shampoo AdaGrad."""
    g = np.array([0.5, -1.0, -1.0, -0.25, 1.0])
    given = g[:, None, None]
    s, squares = g.cumsum(), (g**2).cumsum()
    faml = learners.gbpa(learners.augmented, given, radius=2.0).ravel()
    assert faml[1:] == pytest.approx(-2 * s[:-1] / np.sqrt(s**2 + 1 + squares)[:-1])
    eta = bounds.eta(bounds.REGULARIZED)
    ftrl = learners.gbpa(learners.regularized, given, radius=2.0, eta=eta).ravel()
    free = -eta * s[:-1] / np.sqrt(1 + squares)[:-1]
    assert ftrl[1:] == pytest.approx(2 * np.clip(free, -1, 1))
    x, wanted = 0.0, [0.0]
    for t in range(4):
        x = float(np.clip(x - 2 * math.sqrt(2) * g[t] / math.sqrt(squares[t]), -2, 2))
        wanted.append(x)
    shampoo = learners.shampoo(given, radius=2.0, exponents=(0.5, 0.0)).ravel()
    assert shampoo == pytest.approx(wanted, abs=1e-9)
    ogd = {"update": "ogd", "preconditioner": "full", "ball": "l2"}
    assert learners.adagrad(given, radius=2.0, **ogd).ravel() == pytest.approx(wanted, abs=1e-9)


# ---- the lemma, the conversion, the costs


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_terms_of_the_lemma_sum_to_the_regret(discount):
    given = normal(7, 6, 2, 3) / 4
    for value, slope, constants in (
        (smoothings.hyperbolic_value, learners.augmented, bounds.HYPERBOLIC),
        (smoothings.regularized_value, learners.regularized, bounds.REGULARIZED),
    ):
        game = {"radius": 2.0, "bound": 1.0, "discount": discount}
        found = lemmas.terms(value, slope, given, constants, **game)
        actions = learners.gbpa(slope, given, **game, eta=bounds.eta(constants))
        regret = learners.regret(given, actions, radius=2.0, discount=discount)
        kinds = ("underestimation", "bregman", "stability", "first_round")
        assert sum(found[k] for k in kinds) == pytest.approx(regret)
        # The bounds on the terms add up to at least the theorem's leading part.
        for kind in kinds[1:]:
            assert found[kind] <= found[f"{kind}_bound"] + 1e-9


def test_the_law_of_tau_and_the_average():
    law = conversion.law_of_tau(30, 0.9)
    assert law.sum() == pytest.approx(1) and law[0] == pytest.approx(0.1 / 30)
    path = normal(8, 7, 1, 1)
    ones = conversion.average(np.ones((7, 1, 1)), 0.9)
    assert ones == pytest.approx(1)  # a weighted mean
    shorter = conversion.average(path[:6], 0.9)
    share = 0.1 / (1 - 0.9**7)
    assert conversion.average(path, 0.9) == pytest.approx(shorter + share * (path[6] - shorter))


def test_counted_rounds_compute_what_they_should():
    s, g, z = normal(9, 3, 6), normal(10, 3, 6), normal(11, 2, 3, 6)
    level = np.eye(3) + g @ g.T
    exact = learners.augmented(s, level)
    for found, flops in (
        (costs.augmented(s, g, np.eye(3), 60), 4 * 54 + 60 * (2 * 54 + 4 * 27)),
        (costs.coupled(s, g, np.eye(3), 60), 6 * 54 + 6 * 60 * 27),
    ):
        assert found[0] == pytest.approx(exact, abs=1e-6) and found[1] == flops
    mean, flops = costs.ftpl(s, g, np.eye(3), z, 60)
    assert mean == pytest.approx(learners.perturbed(lambda t: z)(s, level, 0), abs=1e-6)
    assert flops == pytest.approx(2 * 54 + 9 + 4 * 2 * 60 * 54 + 2 * 2 * 54)


# ---- the lemmas


@pytest.mark.parametrize(("degrees", "noncentrality"), [(3, 0.5), (5, 40.0)])
def test_the_quadrature_is_the_expectation(degrees, noncentrality):
    def weighted(x):
        return scipy.stats.ncx2.pdf(float(x), degrees, noncentrality) / float(x)

    integral = mpmath.quad(lambda y: 2 * y * weighted(y * y), [1e-8, 1, 3, 8, 20])
    found = lemmas.inverse_moment(degrees, noncentrality)
    assert found == pytest.approx(float(integral), rel=1e-6)


def test_the_shifted_entry_is_that_of_samples():
    y = np.zeros((2, 9))
    y[0, 0] = 1.5
    z = normal(12, 40_000, 2, 9) + y
    entries = np.linalg.inv(z @ np.swapaxes(z, -1, -2))[:, 0, 0]
    error = entries.std() / 200
    assert abs(lemmas.shifted_entry(2, 9, 1.5) - entries.mean()) < 5 * error


def test_the_hessian_on_a_row_is_the_norms():
    x, d = normal(13, 1, 4), normal(14, 1, 4)
    norm = np.linalg.norm(x)
    curvature = ((d @ d.T).item() - ((x @ d.T).item() / norm) ** 2) / norm
    assert lemmas.hessian(x, d) == pytest.approx(curvature, abs=1e-6)
    assert lemmas.hessian_bound(x, d) == pytest.approx((d @ d.T).item() / norm)


def test_the_gradient_sums_in_one_dimension():
    """Σg_t²/√Σg² and 2√Σg², in C.3 and C.4; the drift of |g|-weighted distances in C.5."""
    g, x = normal(15, 6, 1, 1), normal(16, 6, 1, 1)
    levels = np.sqrt((g.ravel() ** 2).cumsum())
    left, right = (g.ravel() ** 2 / levels).sum(), 2 * levels[-1]
    assert lemmas.matrix_potential(g) == pytest.approx((left, right))
    assert lemmas.gradient_term(g) == pytest.approx((left, right))
    drift = (np.diff(levels, prepend=0.0) * (x.ravel() - 0.3) ** 2).sum()
    found = lemmas.distance_term(g, x, np.array([[0.3]]), radius=1.5)
    assert found == pytest.approx((drift, 4 * 1.5**2 * 2 * levels[-1]))
    weights, ones = levels[:, None, None], np.ones((6, 1, 1))
    regret = (g * (x - 0.3)).sum()
    bound = drift / (2 * 0.7) + 0.7 / 2 * left
    found = lemmas.mirror_descent(g, x, np.array([[0.3]]), weights, ones, eta=0.7)
    assert found == pytest.approx((regret, bound))


def test_the_printed_double_sum_is_an_identity():
    first, second = conversion.discounted_changes([3, -1, 4, 1, -5], 0.25)
    assert first + second == -8
    assert first == sum(Fraction(1, 4) ** (3 - t) * d for t, d in enumerate([-4, 5, -3, -6]))


def test_a_mixture_lies_between_the_norm_and_its_ceiling():
    parts = [
        (smoothings.hyperbolic_value, bounds.HYPERBOLIC, 0.3, 2.0),
        (smoothings.regularized_value, bounds.REGULARIZED, 0.7, 0.5),
    ]
    x = normal(17, 5, 2, 3)
    pair = smoothings.mixture_constants(parts)
    assert pair == pytest.approx((0.3 * 2 + 0.7 / 4, 0.15 + 1.4))
    assert math.prod(pair) >= smoothings.least_product(parts) >= 0.5
    root = smoothings.best_root(x, pair)
    norms, value = algebra.nuclear(x), smoothings.mixture_value(parts, x, root)
    ceiling = smoothings.ceiling(x, root, pair)
    assert ceiling == pytest.approx(math.sqrt(2 * math.prod(pair)) * norms)
    assert (norms <= value + 1e-12).all() and (value <= ceiling + 1e-12).all()


@pytest.mark.parametrize("mu", [1e-4, 0.3, 2.0, -7.0])
def test_the_mean_cosine_is_the_integral(mu):
    """E[x_1/‖x‖] over the angle: the density of the cosine u of N(μe_1, I_3), by quadrature."""

    def density(r, u):
        return r**2 * math.exp(-(r**2 - 2 * r * mu * u + mu**2) / 2) / math.sqrt(2 * math.pi)

    value, _ = scipy.integrate.dblquad(lambda r, u: u * density(r, u), -1, 1, 0, 20)
    assert scalar.mean_cosine(mu) == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize("name", ["FAML", "FTRL"])
def test_scalar_ratios_are_those_of_one_by_one_matrices(name):
    given = np.array([0.5, -1.0, 1.0, 1.0, 0.2])[:, None, None]
    twin = twins.gbpa(name, (1, 1))
    regret = learners.regret(given, twin.actions(given), radius=1.0)
    wanted = regret / twin.bound(given)
    assert scalar.ratio(name, given.ravel()) == pytest.approx(float(wanted), abs=1e-9)


def test_the_deviations_by_hand():
    g = np.ones((5, 1, 1)) * np.array([9.0, 1.0, 2.0, 3.0, 4.0])[:, None, None]  # X_1 is not drawn
    known = {"radius": 2.0, "samples": 3, "delta": 0.1}
    scale = 2 * math.sqrt(2 * math.log(10) / 3)
    assert bounds.oblivious(g, **known) == pytest.approx(scale * math.sqrt(30))
    assert bounds.oblivious(g, **known, redraw=False) == pytest.approx(scale * 10)
    halves = bounds.oblivious(g, **known, discount=0.5)
    assert halves == pytest.approx(scale * math.sqrt(1 / 64 + 1 / 4 + 9 / 4 + 16))
    epsilon = bounds.bernstein(math.log(2 * 5 / 0.1), 300)
    assert 300 * epsilon**2 / 2 == pytest.approx((1 + 2 * epsilon / 3) * math.log(100))
    many = {**known, "samples": 300}
    assert bounds.adaptive(g, **many) == pytest.approx(2 * epsilon * 10)
    pair = np.concatenate([g[:, None]] * 2, 1)
    shared = bounds.oblivious(pair, **known)
    single = bounds.oblivious(g, **{**known, "delta": 0.05})
    assert shared == pytest.approx([single, single])


def test_what_exceeds_the_bound_by_hand():
    g = np.array([1.0, 3.0, -2.0, -5.0])[:, None, None]
    clipped = unknown.fed_matrices(g, clip=True, bound=None)
    assert clipped.gradients.ravel() == pytest.approx([1, 1, -2, -3])
    assert clipped.levels == pytest.approx([1, 3, 3, 5])
    assert clipped.excess == pytest.approx([0, 2, 0, 2])
    stated = unknown.fed_matrices(g, clip=True, bound=2.0)
    assert stated.gradients.ravel() == pytest.approx([1, 2, -2, -2])
    assert stated.levels == pytest.approx([2, 2, 2, 2])
    grown = unknown.fed_matrices(g, clip=False, bound=2.0)
    assert grown.gradients.ravel() == pytest.approx(g.ravel())
    assert grown.levels == pytest.approx([2, 3, 3, 5])
    assert grown.excess == pytest.approx([0, 1, 0, 2])


def test_adagrad_without_a_bound_on_an_interval():
    """The actions −clip(ηs/H) of the interval [−1, 1], and proximal ones by a search on a grid."""
    g = np.array([0.5, 2.0, -1.0, 0.3, -3.0, 1.0])
    side = {"preconditioner": "diagonal", "ball": "linf", "radius": 1.0}
    roots = np.sqrt((g**2).cumsum())
    free = unknown.adagrad(g[:, None, None], offset="scale-free", **side).ravel()
    wanted = -np.clip(2**-0.75 * g.cumsum() / roots, -1, 1)
    assert free[1:] == pytest.approx(wanted[:-1], abs=1e-9)
    cut = np.array([0.5, 0.5, -1.0, 0.3, -2.0, 1.0])
    levels = np.maximum.accumulate(np.abs(g))
    clipped = unknown.adagrad(g[:, None, None], offset="clip", **side).ravel()
    wanted = -np.clip(2**-0.5 * cut.cumsum() / (np.sqrt((cut**2).cumsum()) + levels), -1, 1)
    assert clipped[1:] == pytest.approx(wanted[:-1], abs=1e-9)
    near = unknown.adagrad(g[:, None, None], offset="proximal", **side).ravel()
    grid, grown = np.linspace(-1, 1, 200_001), np.diff(roots, prepend=0.0)
    for t in range(1, 6):
        around = sum(h * (grid - x) ** 2 for h, x in zip(grown[:t], near[:t], strict=True))
        objective = g[:t].sum() * grid + around / (2 * math.sqrt(2))
        assert near[t] == pytest.approx(grid[objective.argmin()], abs=1e-5)


# ---- curvature, promises and ratios at a point


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
    hyperbolic, regularized = smoothings.hyperbolic(), smoothings.regularized()
    found = smoothings.stability(hyperbolic, s, root, more)
    assert found == pytest.approx((math.hypot(0.7, 0.9) - math.hypot(0.7, 0.5)) / 0.4)
    assert np.isnan(smoothings.stability(hyperbolic, s, more, root)).all()
    # |s| > l: the maximizer is at the edge, |s| − l/2 + l/2; else s²/2l + l/2.
    found = smoothings.smoothness(regularized, 0.1 * s, root, s - 0.1 * s)
    ahead = 0.7 - (0.07**2 / 1.0 + 0.25) - 0.63 * 0.07 / 0.5
    assert found == pytest.approx(2 * ahead * 0.5 / 0.63**2)
    draws = normal(2, 5, 1, 2)
    found = smoothings.gaussian(draws).value(s, root)
    np.testing.assert_allclose(
        found, np.hypot(0.7 + 0.5 * draws[:, 0, 0], 0.5 * draws[:, 0, 1]), rtol=1e-12
    )


# ---- that a difference is noticed


def passed(rows):
    (check,) = (i for i in beside.against_oracle(rows) if isinstance(i, Check))
    return check.passed


def test_a_wrong_learner_and_a_wrong_bound_are_noticed():
    given = beside.leaning((2, 3, 4))
    twin = twins.gbpa("FAML", (2, 3, 4))
    right = beside.compare("FAML", FAML((2, 3, 4), dtype=F64), given, twin)
    assert passed([right])
    other = FAML((2, 3, 4), eta=1.001, dtype=F64)
    wrong = beside.compare("FAML", other, given, twin)
    assert not passed([wrong])
    missing = Row(name="no number", actions=math.nan, regret=0.0, bound=0.0, exact=True)
    assert not passed([missing])


def test_a_wrong_step_is_noticed(monkeypatch):
    assert all(check.passed for check in optimizers.checks((3, 5)))
    monkeypatch.setitem(
        optimizers.METHODS, "Leon", (lambda *a, **k: Leon(*a, beta2=0.9, **k), "eigh")
    )
    missed = [check.name for check in optimizers.checks((3, 5)) if not check.passed]
    assert missed == ["Leon, the optimizer: steps against the reference's, over the rate"]


def test_the_laws_of_the_process_can_fail(monkeypatch):
    assert all(check.passed for check in conversions.conduct(3))
    real = O2NC._draw_tau
    monkeypatch.setattr(O2NC, "_draw_tau", lambda self: real(self).clamp(max=self.rounds - 1))
    assert [c.passed for c in conversions.conduct(3)] == [True, False, False, True]


def test_the_distance_of_lengths_is_kolmogorovs():
    lengths = np.sort(np.random.default_rng(0).exponential(size=500))
    wanted = scipy.stats.kstest(lengths, "expon").statistic * math.sqrt(500)
    assert conversions.distance_from_exponential(lengths) == pytest.approx(wanted)
