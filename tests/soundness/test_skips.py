"""What is not finite keeps its bits: wherever it arises, and whoever its neighbours are."""

import pytest
import torch

from soundness import skips
from soundness.marks import param

FAULTS = [*skips.faults("cpu")]


def known(case):
    """A case as a parameter."""
    name, setting = case
    bare = name == "Λ overflows by gradient_bound" and setting.dtype == torch.float64
    due = "Python's power raises OverflowError in the middle of a step" if bare else None
    return param(*case, due=due, name=f"{name}-{setting}")


@pytest.mark.parametrize(("name", "setting"), [known(case) for case in FAULTS])
def test_a_skipped_step_changes_no_bit(name, setting):
    skips.skip_keeps_the_bits(name, setting)


@pytest.mark.parametrize(
    ("name", "setting"), [known(case) for case in FAULTS if skips.of_one_matrix(case[0])]
)
def test_the_neighbours_of_a_skipped_matrix_step_as_ever(name, setting):
    skips.neighbours_step_as_ever(name, setting)
