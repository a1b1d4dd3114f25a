"""Matrices with a non-finite number keep their bits, wherever it arises."""

import pytest

from soundness import skips

FAULTS = [*skips.faults("cpu")]
ALONE = [case for case in FAULTS if skips.of_one_matrix(case[0])]


@pytest.mark.parametrize(("name", "setting"), FAULTS, ids=[f"{n}-{s}" for n, s in FAULTS])
def test_a_skipped_step_changes_no_bit(name, setting):
    skips.check_skip(name, setting)


@pytest.mark.parametrize(("name", "setting"), ALONE, ids=[f"{n}-{s}" for n, s in ALONE])
def test_the_neighbours_of_a_skipped_matrix_step_as_ever(name, setting):
    skips.check_neighbours(name, setting)
