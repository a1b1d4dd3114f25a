"""A^(-1/2): cut ranks and steps.

`test_every_method.py` has what every method promises of every input.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg import inverse_sqrt
from nucleon.linalg.roots import coupled_steps, floor
from strategies import (
    F64,
    FULL,
    eps,
    geometric,
    operator_norms,
    orthogonal,
    seeds,
    with_eigenvalues,
)

sizes = st.sampled_from([1, 2, 5, 17])


@settings(max_examples=40)
@given(m=sizes, dtype=st.sampled_from(FULL), data=st.data(), seed=seeds)
def test_a_deficient_matrix_gives_the_pseudo_inverse_root(m, dtype, data, seed):
    rank = data.draw(st.integers(0, m))
    values = geometric(m, 2.0, rank)
    a = with_eigenvalues(values, seed).to(dtype)
    q = orthogonal(m, m, seed)
    inverse = torch.where(values > 0, values, math.inf).rsqrt()
    expected = (q * inverse) @ q.mT
    # ‖A^(-1/2)‖ ≤ 10 and eigenvectors turn by eps·‖A‖/gap, gap ≥ 1e-2, when A is rounded.
    tolerance = 10 * (m * eps(dtype) / 1e-2 + eps(dtype))
    assert operator_norms(inverse_sqrt(a) - expected) <= tolerance


def test_rank_tolerance_cuts_relative_to_the_largest_eigenvalue():
    a = 1e5 * torch.diag(torch.tensor([1, 1e-3, 1e-6, 1e-9], dtype=F64))
    for tolerance, rank in ((0.0, 4), (1e-8, 3), (1e-5, 2), (0.5, 1)):
        root = inverse_sqrt(a, rank_tolerance=tolerance)
        assert torch.linalg.matrix_rank(root, atol=1e-9) == rank
    # By default rounding is cut, and nothing else.
    noisy = torch.diag(torch.tensor([1, 0.5 * 4 * eps(F64), 0, 2 * 4 * eps(F64)], dtype=F64))
    assert torch.linalg.matrix_rank(inverse_sqrt(noisy), atol=1e-9) == 2


def test_a_float32_matrix_is_cut_at_its_own_rounding():
    unit = eps(torch.float32)
    assert inverse_sqrt(torch.diag(torch.tensor([1.0, unit])))[1, 1] == 0
    signal = inverse_sqrt(torch.diag(torch.tensor([1.0, 4 * unit])))
    assert signal[1, 1].item() == pytest.approx((4 * unit) ** -0.5, rel=unit)


@pytest.mark.parametrize("dtype", FULL)
def test_default_steps_carry_the_floor_to_one_and_no_fewer_would(dtype):
    steps, x = coupled_steps(dtype), math.sqrt(floor(dtype))
    for i in range(steps):
        assert 1 - x > eps(dtype), f"{i} steps would do"
        x = 1.5 * x - 0.5 * x**3
    assert 1 - x <= eps(dtype)
