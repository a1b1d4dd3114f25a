"""Runs that anything may happen to, against the float64 oracle."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from soundness.cases import DTYPES, METHODS
from soundness.machine import machine
from soundness.marks import SOAK

HERE = -(-settings.default.max_examples // (3 if SOAK else 5))
"""Random runs of each optimizer in each dtype: 240 in all by default, 20,000 in `make soak`."""


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("make", METHODS, ids=lambda c: c.__name__)
def test_no_run_leaves_the_ball_or_loses_its_weights(make, dtype, record_property):
    """At every step: finite weights, ‖P‖ ≤ 1, Ĝ, M̂ and P those of the oracle, skips counted."""
    counted = [0, 0]
    run_state_machine_as_test(
        machine(make, dtype, counted), settings=settings(max_examples=HERE, stateful_step_count=10)
    )
    record_property("runs", counted[0])
    record_property("steps of matrices", counted[1])
    assert counted[0] >= HERE
