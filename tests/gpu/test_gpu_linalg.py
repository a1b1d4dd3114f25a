"""The matrix functions on CUDA keep the promises they make on the CPU."""

import math

import pytest
import torch

from nucleon import linalg

DTYPES = [torch.float32, torch.float64]
CONDITIONS = [1.0, 1e3, 1e7]


def with_condition(m, n, condition, seed=0, batch=2):
    """A float64 batch with singular values from 1 down to 1/condition."""
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    u = torch.linalg.qr(torch.randn(batch, m, m, **draw)).Q
    v = torch.linalg.qr(torch.randn(batch, n, m, **draw)).Q
    return (u * torch.logspace(0, -math.log10(condition), m, dtype=torch.float64)) @ v.mT


def norm(x):
    return torch.linalg.matrix_norm(x.detach().double().cpu(), 2).max().item()


def polar(s):
    u, _, vh = torch.linalg.svd(s, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(
    "method", ["svd", "newton-schulz", "polar-express", "scaled-newton", "qdwh"]
)
def test_polar(method, condition, dtype):
    s = with_condition(20, 50, condition).to(dtype)
    p = linalg.polar(s.cuda(), method=method)
    assert p.is_cuda and p.dtype == dtype
    exact = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    limit = exact if method == "svd" else {torch.float64: 1e-9, torch.float32: 1e-3}[dtype]
    assert norm(p) <= 1 + limit
    # The polar factor moves by about eps·condition with S, and the default rank is above √eps.
    eps = torch.finfo(dtype).eps
    if condition < 0.1 * eps**-0.5:
        error = norm(p.cpu().double() - polar(s.double()))
        assert error <= 100 * eps * condition + eps**0.75 * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("zero", [False, True], ids=["smoothed", "unsmoothed"])
@pytest.mark.parametrize("method", ["eigh", "newton-schulz", "polar-express", "coupled"])
def test_augmented_polar(method, zero, condition, dtype):
    s = with_condition(20, 50, condition).to(dtype)
    g = with_condition(20, 50, condition, seed=1).to(dtype)
    smoothing = (g @ g.mT) * (0 if zero else 1)
    p = linalg.augmented_polar(s.cuda(), smoothing.cuda(), method=method)
    assert p.is_cuda and p.dtype == dtype
    exact = {torch.float64: 1e-9, torch.float32: 1e-5}[dtype]
    limit = exact if method == "eigh" else {torch.float64: 1e-9, torch.float32: 1e-3}[dtype]
    assert norm(p) <= 1 + limit
    eps = torch.finfo(dtype).eps
    if condition < 0.1 * eps**-0.5:  # beyond it, the rounding of Λ decides
        same = linalg.augmented_polar(s, smoothing, method=method)
        reference = linalg.augmented_polar(s.double(), smoothing.double())
        # The two devices round apart; each is as near to the float64 reference as the other, which
        # itself errs by eps·κ, κ = condition², through the float64 Gram.
        error, here = norm(p.cpu().double() - reference), norm(same.double() - reference)
        assert error <= 4 * here + 100 * eps + 4 * 2.0**-52 * condition**2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e5])  # below 1/(m·eps), where "eigh" cuts
@pytest.mark.parametrize("method", ["eigh", "newton-schulz"])
def test_inverse_sqrt(method, condition, dtype):
    s = with_condition(20, 20, math.sqrt(condition))
    a = (s @ s.mT).to(dtype)
    z = linalg.inverse_sqrt(a.cuda(), method=method)
    values, vectors = torch.linalg.eigh(a.double())
    exact = (vectors * values.clamp_min(1e-300).rsqrt().unsqueeze(-2)) @ vectors.mT
    eps = torch.finfo(dtype).eps
    # "eigh" of float32 works in float64; the coupled iteration adds 16 eps‖A‖_F, √20 at most,
    # which moves 1/√λ by a relative 8√20·eps·condition, and its products round likewise.
    relative = 20 * eps if method == "eigh" and dtype == torch.float32 else 200 * eps * condition
    if relative < 0.1:
        assert norm(z.cpu().double() - exact) <= relative * math.sqrt(condition)


def test_norms_and_projection():
    x = with_condition(20, 50, 1e3).float() * 7
    assert norm(linalg.operator_norm(x.cuda())[None] - linalg.operator_norm(x).cuda()[None]) < 1e-5
    torch.testing.assert_close(linalg.nuclear_norm(x.cuda()).cpu(), linalg.nuclear_norm(x))
    assert norm(linalg.project_operator_ball(x.cuda(), 2.0)) <= 2 * (1 + 1e-5)
