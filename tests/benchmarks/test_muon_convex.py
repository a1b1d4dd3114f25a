"""The convex loss on which Muon without momentum does not move x + y."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from muon_convex import EPSILON, START, losses


def test_muon_without_momentum_keeps_x_plus_y():
    floor = EPSILON * sum(START)  # and |x − y| is at most the last two moves, 2·0.2/√t each
    assert floor <= min(losses("Muon", 0.0, 1000)[-100:]) + 1e-12
    assert max(losses("Muon", 0.0, 1000)[-100:]) <= floor + 0.8 / 900**0.5


@pytest.mark.parametrize(("method", "momentum"), [("Leon", 0.0), ("Muon", 0.9), ("Leon", 0.9)])
def test_the_others_descend_below_it(method, momentum):
    assert max(losses(method, momentum, 1000)[-100:]) < EPSILON * sum(START) / 4
