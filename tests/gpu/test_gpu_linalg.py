"""The matrix functions on CUDA keep the promises they make on the CPU."""

import math

import pytest
import torch

from nucleon import linalg
from nucleon.linalg.augmented import METHODS as AUGMENTED
from nucleon.linalg.polar import METHODS as POLAR
from nucleon.linalg.roots import METHODS as ROOTS

FUNCTIONS = {
    "polar": (linalg.polar, POLAR),
    "smoothed": (linalg.augmented_polar, AUGMENTED),
    "unsmoothed": (linalg.augmented_polar, AUGMENTED),
    "root": (linalg.inverse_sqrt, ROOTS),
}
CASES = [(kind, method) for kind, (_, methods) in FUNCTIONS.items() for method in methods]


def with_condition(m, n, condition, seed=0, batch=2):
    """A float64 batch with singular values from 1 down to 1/condition."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    u = torch.linalg.qr(torch.randn(batch, m, m, **draw)).Q
    v = torch.linalg.qr(torch.randn(batch, n, m, **draw)).Q
    return (u * torch.logspace(0, -math.log10(condition), m, dtype=torch.float64)) @ v.mT


def norm(x):
    return torch.linalg.matrix_norm(x.detach().double().cpu(), 2).max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e5, 1e7])
@pytest.mark.parametrize(("kind", "method"), CASES)
def test_a_result_is_in_the_ball_and_as_near_to_the_reference_as_on_the_cpu(
    kind, method, condition, dtype
):
    s, g = (with_condition(20, 50, condition, seed).to(dtype) for seed in (0, 1))
    square = with_condition(20, 20, math.sqrt(condition))
    arguments = {
        "polar": (s,),
        "smoothed": (s, g @ g.mT),
        "unsmoothed": (s, 0 * (g @ g.mT)),
        "root": ((square @ square.mT).to(dtype),),
    }[kind]
    function, eps = FUNCTIONS[kind][0], torch.finfo(dtype).eps
    result = function(*(x.cuda() for x in arguments), method=method)
    assert result.is_cuda and result.dtype == dtype
    if kind != "root":
        limit = 1e-5 if method in ("svd", "eigh") else 1e-3
        assert norm(result) <= 1 + (1e-9 if dtype == torch.float64 else limit)
    if condition < 0.1 * eps**-0.5:  # beyond it, rounding decides
        exact = function(*(x.double() for x in arguments))
        here, there = (
            norm(x.cpu().double() - exact) for x in (function(*arguments, method=method), result)
        )
        # The two devices round apart, and the reference itself errs by eps·κ of a float64 Gram.
        slack = 200 * eps * condition + 2 * eps**0.75 + 4 * 2.0**-52 * condition**2
        assert there <= 4 * here + slack * norm(exact)


def test_norms_and_projection():
    x = with_condition(20, 50, 1e3).float() * 7
    torch.testing.assert_close(linalg.operator_norm(x.cuda()).cpu(), linalg.operator_norm(x))
    torch.testing.assert_close(linalg.nuclear_norm(x.cuda()).cpu(), linalg.nuclear_norm(x))
    assert norm(linalg.project_operator_ball(x.cuda(), 2.0)) <= 2 * (1 + 1e-5)
