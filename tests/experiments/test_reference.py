"""The reference itself, by other means; that the claims' checks against it can fail."""

import ast
import json
import math
from pathlib import Path

import cvxpy
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from nucleon import streams
from nucleon.experiments import agreement, conversions, games, optimizers, twins
from nucleon.experiments.reference import algebra, bounds, conversion, costs, learners, lemma
from nucleon.learners import FAML, FTRL
from nucleon.optim import O2NC, Leon

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
                own = name.startswith("nucleon.experiments.reference")
                assert own or not name.startswith(("nucleon", "torch")), (file.name, name)


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
        (lemma.hyperbolic_value, learners.augmented),
        (lemma.regularized_value, learners.regularized),
        (lemma.perturbed_value(lambda t: z), learners.perturbed(lambda t: z)),
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
        (lemma.hyperbolic_value, learners.augmented, bounds.HYPERBOLIC),
        (lemma.regularized_value, learners.regularized, bounds.REGULARIZED),
    ):
        game = {"radius": 2.0, "bound": 1.0, "discount": discount}
        found = lemma.terms(value, slope, given, constants, **game)
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


# ---- that a difference is noticed


def test_a_wrong_learner_and_a_wrong_bound_are_noticed():
    given = agreement.leaning((2, 3, 4))
    twin = twins.gbpa_twin("FAML", (2, 3, 4))
    right = agreement.compare("FAML", FAML((2, 3, 4), dtype=F64), given, twin)
    assert all(check.passed for check in agreement.checks([right]))
    other = FAML((2, 3, 4), eta=1.001, dtype=F64)
    wrong = agreement.compare("FAML", other, given, twin)
    assert not any(check.passed for check in agreement.checks([wrong]))
    missing = agreement.Agreement("no number", math.nan, 0.0, 0.0)
    assert not any(check.passed for check in agreement.checks([missing]))


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
    assert [c.passed for c in conversions.conduct(3)] == [True, False, True]


def test_the_distance_of_lengths_is_kolmogorovs():
    lengths = np.sort(np.random.default_rng(0).exponential(size=500))
    wanted = scipy.stats.kstest(lengths, "expon").statistic * math.sqrt(500)
    assert conversions._distance(lengths) == pytest.approx(wanted)


# ---- the lower side


@pytest.mark.parametrize("make", [FAML, FTRL])
def test_the_swing_costs_a_share_of_the_bound(make):
    (check,) = games.lower_side(make.__name__, make, (2, 3), 0.5)
    assert check.passed and check.threshold == games.LEAST[make.__name__]


def test_stored_streams_are_replayed(tmp_path, monkeypatch):
    assert games.stored("FAML", tmp_path) == ()
    signs = games.swing(60, 2.0)
    ratio = games.share(FAML((1, 1), dtype=F64), signs[:, None, None])
    held = {"learner": "FAML", "radius": 1.0, "bound": 1.0, "ratio": ratio}
    held["gradients"] = signs[:, None, None].tolist()
    (tmp_path / "one.json").write_text(json.dumps(held), encoding="utf-8")
    (found,) = games.stored("FAML", tmp_path)
    assert (found.name, found.shape, found.ratio) == ("one", (1, 1), ratio)
    assert games.stored("FTRL", tmp_path) == ()
    monkeypatch.setattr(games, "stored", lambda name: (found,))
    _, replayed = games.lower_side("FAML", FAML, (1, 1))
    assert replayed.passed and replayed.measured == pytest.approx(ratio)


def test_the_swing_alternates_and_then_pushes():
    signs = games.swing(100, 2.0)
    assert signs[:80].sum() == 0 and (signs[80:] == -1).all()
    stream = streams.replay(signs[:, None, None])
    assert stream.rounds == 100
