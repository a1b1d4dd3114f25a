"""The mean action of Gaussian FTPL against SciPy's hypergeometric function."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from nucleon.online.learners.ftpl import mean_cosine

F64 = torch.float64


def kummer(ratio, d):
    """κ·Γ((d+1)/2)/(√2·Γ(d/2+1))·₁F₁(½; d/2+1; −κ²/2)."""
    factor = math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2 + 1)) / math.sqrt(2)
    return ratio * factor * scipy.special.hyp1f1(0.5, d / 2 + 1, -(ratio**2) / 2)


@pytest.mark.parametrize("d", [2, 3, 10, 1001])
def test_the_mean_length_is_kummers_function(d):
    ratio = np.array([0.0, 1e-6, 0.1, 1.0, 5.0, 20.0])
    ours = mean_cosine(torch.from_numpy(ratio), d).numpy()
    np.testing.assert_allclose(ours, kummer(ratio, d), rtol=1e-11)


@pytest.mark.parametrize("d", [2, 3, 64])
def test_the_mean_length_far_out(d):
    # E cos = 1 − (d−1)/(2κ²) + O(κ⁻⁴)
    ratio = torch.tensor([1e3, 1e5, 1e8], dtype=F64)
    expected = 1 - (d - 1) / (2 * ratio**2)
    assert ((mean_cosine(ratio, d) - expected).abs() <= d**2 / ratio**4 + 1e-13).all()
