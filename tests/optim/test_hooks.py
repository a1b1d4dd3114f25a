"""A direction of one's own runs as written, with all that the base class has around it."""

import pytest
import torch

from optim import hook_cases as cases

CPU = torch.device("cpu")
every = pytest.mark.parametrize("method", cases.METHODS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
checks = pytest.mark.parametrize(
    "check", [cases.runs_as_written, cases.owners_alone, cases.diagnostics, cases.state_dict]
)


@checks
@dtypes
@every
def test_a_direction_of_ones_own(check, dtype, method):
    check(CPU, method, dtype)


@dtypes
def test_a_direction_that_is_assigned(dtype):
    cases.assigned(CPU, dtype)
