"""The claims on the classical learners: the quick ones hold, and their numbers by NumPy."""

import math

import numpy as np
import pytest
import torch

from nucleon.claims.timing import projection_cost
from nucleon.linalg import quadratic_projection
from nucleon.online.learners import FTRL, OneSidedShampoo

F64 = torch.float64


# ---- projection-cost ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured():
    return projection_cost.capture((6, 10), "with a mean", (8, 9), 0, lambda stage: None)


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


def test_every_solver_reaches_its_gap_by_the_textbooks_measure(captured):
    problems, seconds, regrets = captured
    assert seconds > 0 and {p.learner for p in problems} == {"one-sided Shampoo", "FTRL"}
    assert set(regrets) == {"FAML", "FTRL", "one-sided Shampoo"}
    for problem in problems:
        found = [*projection_cost.solve(problem), *projection_cost.textbook(problem)]
        textbook = [s for s in found if s.solver == projection_cost.TEXTBOOK]
        assert [s.tolerance for s in textbook] == list(projection_cost.GAPS)
        steps = [s.iterations for s in textbook]
        assert steps == sorted(steps) and textbook[-1].seconds >= textbook[0].seconds
        assert all(s.converged for s in textbook)
        for solver in ("projected-gradient", "douglas-rachford"):
            assert sum(s.solver == solver and s.converged for s in found) == 4


def test_a_gap_that_one_round_missed_counts_as_not_reached():
    def solved(round, reached, seconds=0.2):
        return projection_cost.Solved("a", "s", round, "x", 1e-6, reached, 7, seconds)

    costs = projection_cost._Costs([solved(1, 1e-7), solved(2, 1e-6)], {"s": 0.01}, 2)
    assert costs.ratio("a", "s", "x") == pytest.approx(20)
    assert costs.iterations("a", "s", "x") == 7
    missed = projection_cost._Costs([solved(1, 1e-7), solved(2, 2e-6)], {"s": 0.01}, 2)
    assert math.isinf(missed.ratio("a", "s", "x")) and math.isinf(missed.iterations("a", "s", "x"))


@pytest.mark.parametrize("quick", ["projection-cost"], indirect=True)
def test_the_claim_says_what_it_does_not_show(quick):
    _, result, _ = quick
    assert "FTRL is judged as the paper solves it" in " ".join(result.notes)
    assert "without a verdict" in " ".join(result.notes)
    judged = [c.name for c in result.checks if c.name.startswith("FTRL")]
    assert judged and all("textbook" in name for name in judged)
