"""The claims on times: their fits and their solvers, and that they can fail."""

import functools
import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import torch

from nucleon.claims.engine import Row, Rows
from nucleon.claims.timing import cost_model, projection_cost
from nucleon.linalg import quadratic_projection
from nucleon.online.learners import FTRL, OneSidedShampoo

F64 = torch.float64


# ---- cost-model --------------------------------------------------------------------------------


def timings(seconds, overhead=0.0):
    points = itertools.product((64, 128, 256), (1, 2, 4), (4, 8))
    return Rows(
        Row(m=m, n=a * m, steps=k, seconds=overhead + seconds(m, a * m, k), overhead=overhead)
        for m, a, k in points
    )


def test_the_fit_recovers_its_constants():
    def seconds(m, n, k):
        return 2e-11 * (4 * m**2 * n + 2 * k * m**2 * n) + 3e-11 * 4 * k * m**3

    found = cost_model.fit("augmented", timings(seconds, overhead=1e-4))
    assert (found.wide, found.square) == pytest.approx((2e-11, 3e-11), rel=1e-6)
    assert found.explained == pytest.approx(1) and found.factor == pytest.approx(1)
    flops = cost_model.METHODS["augmented"].flops
    even = cost_model.fit("augmented", timings(lambda m, n, k: 1e-11 * flops(m, n, k)))
    assert len(even.exponents) == 3
    assert all(a == pytest.approx(b) for a, b in even.exponents)
    assert all(check.passed for check in cost_model.fit_checks(Rows([even])))


def test_the_cost_claim_can_fail():
    rows, others = "error of the exponent of m", "of n and K, the larger"

    def missed(seconds):
        made = cost_model.fit_checks(Rows([cost_model.fit("coupled", timings(seconds))]))
        return [check.name.removeprefix("coupled: ") for check in made if not check.passed]

    flops = cost_model.METHODS["coupled"].flops
    assert {rows, others} <= set(missed(lambda m, n, k: 1e-9 * m**2))  # m² for m³, and no K
    assert {rows, others} <= set(missed(lambda m, n, k: 1e-15 * m**3 * n))
    assert missed(lambda m, n, k: 1e-11 * 6 * (k + 1) * m**3) == [others]  # no n
    assert missed(lambda m, n, k: 1e-9 * m**-0.4 * flops(m, n, k)) == [rows]
    generator = np.random.default_rng(0)
    noise = functools.cache(lambda m, n, k: 10 ** generator.uniform(-1, 1))
    jumpy = missed(lambda m, n, k: 1e-11 * flops(m, n, k) * noise(m, n, k))
    assert {"variance of log time explained", "median factor off the model"} <= set(jumpy)


def slopes(seconds, rows=cost_model.ROWS[0]):
    """Slopes of the logarithm in those of m, n/m and K, by NumPy over the claim's grid."""
    grid = list(itertools.product(rows, cost_model.ASPECTS[0], cost_model.STEPS))
    x = [[1, math.log(m), math.log(a), math.log(k)] for m, a, k in grid]
    y = [math.log(seconds(m, a * m, k)) for m, a, k in grid]
    return np.linalg.lstsq(np.array(x), np.array(y))[0][1:]


def test_the_tolerances_of_the_exponents_are_what_the_argument_gives():
    """Omitted terms take as long as the flops at m = 128, in one kind of term or in both."""
    low = slopes(lambda m, n, k: m**3 + cost_model.LEADS * m**2)[0]
    assert 3 - low == pytest.approx(cost_model.ROW_EXPONENT, rel=0.02)
    worst = 0.0
    for name in ("augmented", "coupled", "FTPL"):
        method = cost_model.METHODS[name]
        for cost in (2, 0.5):
            changed = slopes(
                lambda m, n, k, f=method, c=cost: f.flops(m, n, k) + (c - 1) * f.square(m, n, k)
            )
            worst = max(worst, *abs(changed - slopes(method.flops))[1:])
    assert 0.1 < worst < cost_model.EXPONENT
    shares = np.linspace(0, 1, 100001)
    off = 2 * shares / (2 * shares + 1 - shares) - shares
    assert off.max() == pytest.approx(cost_model.EXPONENT, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_nonnegative_least_squares_against_scipy(seed):
    generator = np.random.default_rng(seed)
    a, b = generator.standard_normal((9, 3)), generator.standard_normal(9)
    found = cost_model.nonnegative(torch.from_numpy(a), torch.from_numpy(b))
    assert found.numpy() == pytest.approx(scipy.optimize.nnls(a, b)[0], abs=1e-10)


def test_a_timed_round_of_faml_is_not_the_action_of_nothing():
    assert cost_model.faml_round(6, 10, 1, 0)().any()


def test_the_parts_of_the_formulas():
    for name, square in (
        ("augmented", lambda m, k: 4 * k * m**3),
        ("coupled", lambda m, k: 6 * k * m**3),
        ("FTPL", lambda m, k: m**3 / 3),
    ):
        for m, n, k in ((3, 7, 2), (64, 64, 8)):
            assert cost_model.METHODS[name].square(m, n, k) == pytest.approx(square(m, k))


# ---- projection-cost ---------------------------------------------------------------------------


def test_a_captured_problem_is_the_learners_own():
    """Solved, it gives the action that the learner plays next."""
    stream = projection_cost.gradients((4, 6), True, 0)
    shampoo, ftrl = (kind((4, 6), dtype=F64, tolerance=1e-10) for kind in (OneSidedShampoo, FTRL))
    for t in range(1, 6):
        found = projection_cost.of_shampoo(shampoo, stream(t))
        for learner in (shampoo, ftrl):
            learner.play()
            learner.observe(stream(t))
        for learner, (linear, left, start) in (
            (shampoo, found),
            (ftrl, projection_cost.of_ftrl(ftrl)),
        ):
            x = quadratic_projection(linear, left, tolerance=1e-10, start=start).x
            # f is only as strongly convex as its least eigenvalue: a gap of 1e-10 leaves 1e-4 in x.
            np.testing.assert_allclose(x, learner.play(), atol=1e-4)
            if t > 2:  # the start is the action before, not its opposite
                assert ((x - start).norm() < 0.7 * x.norm()).item()


def test_every_solver_reaches_its_gap_by_the_textbooks_measure():
    played = projection_cost.capture("with a mean", (6, 10), (8, 9), 0)
    assert played["seconds"] > 0
    assert {p["learner"] for p in played["_problems"]} == {"one-sided Shampoo", "FTRL"}
    for problem in (p["_problem"] for p in played["_problems"]):
        textbook = list(projection_cost.textbook(*problem))
        found = [*projection_cost.solve(*problem), *textbook]
        assert [s["tolerance"] for s in textbook] == list(projection_cost.GAPS)
        steps = [s["iterations"] for s in textbook]
        assert steps == sorted(steps) and textbook[-1]["seconds"] >= textbook[0]["seconds"]
        for solver in (projection_cost.TEXTBOOK, "projected-gradient", "douglas-rachford"):
            solved = (s for s in found if s["solver"] == solver)
            assert sum(s["reached"] <= s["tolerance"] for s in solved) == 4


def test_a_gap_that_one_round_missed_counts_as_not_reached():
    def median(*gaps):
        rows = (
            Row(round=t, solver="x", tolerance=1e-6, reached=gap, iterations=7)
            for t, gap in enumerate(gaps)
        )
        return projection_cost.median(Rows(rows), "iterations", {"solver": "x"})

    assert median(1e-7, 1e-6) == 7
    assert math.isinf(median(1e-7, 2e-6))
