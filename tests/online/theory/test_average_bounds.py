"""The theorems on the average beside sums that are written out; runs are in the claims."""

import math

import pytest

from nucleon.online import theory


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("rounds", [1, 2, 3, 10, 300])
def test_the_distance_bound_is_above_its_sum(fraction, rounds):
    before = theory.average_weights(fraction, rounds).cumsum(0)[:-1]
    total = 2 * 0.3 * (before * (1 - before)).sum().item()
    bound = theory.average_distance_bound(fraction, rounds, 0.3)
    assert total <= bound <= total + 2 * 0.3  # which is of order T


def test_convex_bounds_by_hand():
    result = theory.average_constant_rate_bound(2, 10, rate=0.1, distance=2.0, gradient_norm=3.0)
    assert result == pytest.approx(4 / 2 + 0.1 * 9 / 2 * (1 + 1 / 2 + 1 / 3))
    # The best c is d/(√2·G), with the factor s_p·dG/√T: √2 for p = 0, 2.94 for p = 8.
    for power, factor in ((0, math.sqrt(2)), (2, 2.17), (8, 2.94)):
        result = theory.average_falling_rate_bound(
            power, 100, rate=2 / (math.sqrt(2) * 3), diameter=2.0, gradient_norm=3.0
        )
        assert result == pytest.approx(factor * 2 * 3 / 10, rel=2e-3)
