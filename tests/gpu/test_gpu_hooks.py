"""A direction of one's own runs as written on CUDA too, where its parent has kernels."""

import pytest
import torch

pytest.importorskip("triton")

import nucleon
from optim import hook_cases as cases
from optim.test_hooks import checks, dtypes, every

CUDA = torch.device("cuda")


@checks
@dtypes
@every
def test_a_direction_of_ones_own(check, dtype, method):
    check(CUDA, method, dtype)


def test_what_a_direction_makes_of_a_matrix_that_rests_is_not_used():
    cases.check_resting(CUDA)


@pytest.mark.parametrize("make", [cases.Clipped, cases.Resolvent])
def test_the_explanation_says_that_there_is_no_kernel(make):
    params = [torch.zeros(64, 96, device=CUDA, requires_grad=True)]
    assert "has no kernel" in str(make(params).explain())
    assert "torch:" not in str(nucleon.Leon(params).explain())
