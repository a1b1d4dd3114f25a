"""The deviations of FTPL's samples: by hand, against simulated tails, and where they must grow."""

import math

import mpmath
import pytest
import torch

from nucleon.online import theory

F64 = torch.float64


def test_oblivious_deviation_by_hand():
    norms = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=F64)
    result = theory.ftpl_oblivious_deviation(norms, radius=2.0, samples=8, delta=0.01)
    scale = 2 * math.sqrt(2 * math.log(100) / 8)
    assert result.tolist() == pytest.approx([5 * scale, scale])
    summed = norms.square().sum(-1, keepdim=True).sqrt()
    again = theory.ftpl_oblivious_deviation(summed, radius=2.0, samples=8, delta=0.01)
    assert again.tolist() == pytest.approx(result.tolist())


@pytest.mark.parametrize("samples", [1, 4, 100, 10_000])
@pytest.mark.parametrize("delta", [0.1, 1e-6])
def test_adaptive_deviation_solves_bernstein_s_equation(samples, delta):
    norms = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    options = {"rows": 2, "columns": 5, "radius": 3.0, "samples": samples, "delta": delta}
    result = theory.ftpl_adaptive_deviation(norms, **options).item()
    log = mpmath.log(7 * 3 / mpmath.mpf(delta))
    root = max(mpmath.polyroots([mpmath.mpf(samples) / 2, -2 * log / 3, -log]))
    assert result == pytest.approx(3 * 6 * float(min(2, root)), rel=1e-12)
    assert result <= 3 * 6 * min(2, math.sqrt(8 * log / samples))  # Hoeffding's
    summed = theory.ftpl_adaptive_deviation(norms.sum().reshape(1), rounds=3, **options)
    assert summed.item() == pytest.approx(result)
