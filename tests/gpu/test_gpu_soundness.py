"""Long, quiet and hostile runs of the fused step; `run_soundness.py` runs them without pytest."""

import pytest

from soundness.everything import every_case

CASES = [pytest.param(c, id=f"{c.group}: {c.name}") for c in every_case("cuda")]


@pytest.mark.parametrize("case", CASES)
def test_a_run_stays_sound(case):
    case.run()
