import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.online.problems import Ripples, random_ripples, random_start

SHAPES = [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7), (7, 3)]


def slow_value(measurements, x):
    """The objective of one instance, term by term in Python floats."""
    terms = []
    for a in measurements.tolist():
        pairs = zip(a, x.tolist(), strict=True)
        r = math.fsum(p * q for row, other in pairs for p, q in zip(row, other, strict=True))
        terms.append(abs(r) * (1 - 0.9 * math.cos(3 * r)) + 0.5)
    return math.fsum(terms) / len(terms)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(SHAPES), st.integers(1, 6), st.integers(0, 2**40), st.sampled_from([0, 1]))
def test_value_is_the_papers_sum(shape, count, seed, log_scale):
    problem = random_ripples([seed], shape=shape, measurements=count)
    x = random_start([seed], shape=shape) * 10.0**log_scale
    expected = slow_value(problem.measurements[0], x[0])
    # A residual of size R carries a rounding error of mn·eps·R, which the cosine multiplies by
    # about 3R: with R below 300 and mn ≤ 21 that is 1e-9 at the very most.
    assert problem.value(x).item() == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from(SHAPES), st.integers(0, 2**40))
def test_gradient_is_autograds(shape, seed):
    problem = random_ripples([seed, seed + 1], shape=shape, measurements=5)
    x = random_start([seed, seed + 1], shape=shape).requires_grad_()
    (expected,) = torch.autograd.grad(problem.value(x).sum(), x)
    torch.testing.assert_close(problem.gradient(x.detach()), expected, rtol=1e-12, atol=1e-12)


def test_gradient_at_a_kink_takes_the_sign_of_zero_as_zero():
    problem = random_ripples([3])
    assert problem.gradient(torch.zeros(1, 20, 20, dtype=torch.float64)).abs().max() == 0


def test_minimum_is_one_half_at_zero():
    problem = random_ripples(range(3))
    assert problem.value(torch.zeros(3, 20, 20, dtype=torch.float64)).tolist() == [0.5] * 3
    for exponent in range(-6, 3):
        x = random_start(range(3)) * 10.0**exponent
        assert (problem.value(x) > 0.5).all()


def test_a_stack_is_its_instances():
    seeds = [7, 0, 2**45]
    stack, x = random_ripples(seeds), random_start(seeds)
    for i, seed in enumerate(seeds):
        one = random_ripples([seed])
        assert torch.equal(one.measurements[0], stack.measurements[i])
        assert torch.equal(random_start([seed])[0], x[i])
        single = Ripples(stack.measurements[i])
        torch.testing.assert_close(single.value(x[i]), stack.value(x)[i], rtol=1e-10, atol=0)
        torch.testing.assert_close(single.gradient(x[i]), stack.gradient(x)[i])


def test_measurements_and_start_have_keys_of_their_own():
    """Noise from one key has common radii, which shows in the squares of the leading half."""
    first = random_ripples([0]).measurements[0, 0].flatten()[:200]
    start = random_start([0]).flatten()[:200]
    for power in (1, 2):
        correlation = torch.corrcoef(torch.stack([first**power, start**power]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(200)


def test_instances_broadcast_over_leading_dimensions():
    # In float64: a rounding of a residual r comes out 8|r| times as large, one way or the other.
    like = {"shape": (3, 4)}
    problem, x = random_ripples(range(2), **like), random_start(range(2), **like)
    both = torch.stack([x, 2 * x])  # (2, 2, 3, 4)
    assert problem.value(both).shape == (2, 2)
    torch.testing.assert_close(problem.gradient(both)[1], problem.gradient(2 * x))
