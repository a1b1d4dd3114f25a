"""Lemmas E.1–E.3 against the oracle's differences and quadratures, SciPy and Monte Carlo."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import wishart
from nucleon.online import theory


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 5)]),
    equal=st.booleans(),
)
def test_nuclear_hessian_is_the_second_derivative(seed, shape, equal):
    rng = np.random.default_rng(seed)
    u, _, v = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    x = u @ np.diag(np.full(shape[0], 2.0) if equal else rng.uniform(1, 3, shape[0])) @ v
    direction = rng.standard_normal(shape)
    direction /= np.linalg.norm(direction)
    left, right = theory.nuclear_hessian(torch.from_numpy(x), torch.from_numpy(direction))
    # Fourth-order central difference: truncation h⁴·O(1), rounding 1e-15·‖X‖_*·16/h² ≈ 1e-7.
    assert left.item() == pytest.approx(wishart.hessian(x, direction), abs=1e-6)
    assert right.item() == pytest.approx(wishart.hessian_bound(x, direction), rel=1e-9)
    assert left <= right * (1 + 1e-12)


def test_nuclear_hessian_is_tight_off_the_row_space():
    x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    direction = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    left, right = theory.nuclear_hessian(x, direction)
    assert left.item() == pytest.approx(1 / 2 + 1 / 3) and right.item() == pytest.approx(5 / 6)
    assert theory.nuclear_hessian(x, x).left.item() == pytest.approx(0, abs=1e-14)  # linear on rays


@pytest.mark.parametrize("degrees", [3, 4, 7, 40])
@pytest.mark.parametrize("noncentrality", [0.01, 1.0, 30.0])
def test_inverse_chi_square_is_the_expectation(degrees, noncentrality):
    law = scipy.stats.ncx2(degrees, noncentrality)
    # x = y² removes the singularity of the density at 0 for k = 3
    integral, error = scipy.integrate.quad(
        lambda y: 2 * law.pdf(y * y) / y, 0, 40, points=[1.0, 5.0, 10.0], limit=400
    )
    left, right = theory.inverse_chi_square(degrees, noncentrality)
    assert left.item() == pytest.approx(integral, abs=10 * error + 1e-9)
    assert left < right and right.item() == 1 / (degrees - 2)


@pytest.mark.parametrize("noncentrality", [0.0, 1e-6, 1.0, 100.0, 1e6])
def test_inverse_chi_square_in_closed_form(noncentrality):
    left, right = theory.inverse_chi_square(4, noncentrality)
    closed = -math.expm1(-noncentrality / 2) / noncentrality if noncentrality else right.item()
    # exp of a log of size λ/2·log λ loses that many roundings
    assert left.item() == pytest.approx(closed, rel=1e-15 * (10 + 20 * noncentrality))


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_inverse_wishart_within_its_interval(scale):
    m, n, samples = 2, 9, 40_000
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(samples, m, n, generator=generator, dtype=torch.float64)
    shift = scale * torch.tensor([[1.0] + [0.0] * 8, [0.0, 0.2] + [0.0] * 7], dtype=torch.float64)
    left, right = theory.inverse_wishart(shift, noise)
    largest = wishart.largest_inverse(shift.numpy(), noise.numpy())
    assert left.item() == pytest.approx(largest, rel=1e-10)
    # five standard errors of the largest direction, for the mean and for picking that direction
    inverses = 1 / torch.linalg.svdvals(noise + shift)[:, -1].square()
    error = 5 * inverses.std().item() / math.sqrt(samples)
    assert right.item() == 1 / 6
    assert left.item() <= right.item() + error
    if scale == 0:
        assert left.item() >= right.item() - error  # the central case is an equality
    if scale == 10:
        # both rows are shifted, by 10 and by 2, so no direction is central any more
        assert left.item() < right.item() - error
