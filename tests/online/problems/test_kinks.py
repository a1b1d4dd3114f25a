import math

import pytest
import torch

from nucleon.online.problems.kinks import Kinks, random_kinks
from nucleon.online.problems.resistance import Resistance

F64 = torch.float64


def points(count=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 8, generator=generator, dtype=F64)


def test_the_value_by_hand():
    problem = Kinks(torch.eye(2, 8, dtype=F64)[None])
    w = torch.zeros(2, 8, dtype=F64)
    assert problem.value(w) == 0
    w[0, 0] = -0.7
    expected = 0.7 + abs(math.sin(2.1)) / 12
    assert problem.value(w).item() == pytest.approx(expected, rel=1e-14)


def test_the_gradient_is_that_of_the_value():
    """Against autograd at 200 points, none of which is on a kink."""
    problem, w = random_kinks(3), points().requires_grad_()
    (expected,) = torch.autograd.grad(problem.value(w).sum(), w)
    torch.testing.assert_close(problem.gradient(w.detach()), expected, rtol=1e-12, atol=1e-13)


def test_the_sampled_gradient_is_unbiased_and_a_summand():
    problem, w = random_kinks(3), points()
    every = [problem.sample(w, torch.full((200,), k)) for k in range(16)]
    mean = torch.stack(every).mean(0)
    torch.testing.assert_close(mean, problem.gradient(w), rtol=1e-12, atol=1e-13)
    draws = problem.draws(500, 40, seed=1)
    counts = torch.bincount(draws.flatten(), minlength=16).double()
    # 20 000 fair draws among 16: five standard errors of a count are 5·√(20000·15/256) ≈ 171.
    assert len(counts) == 16 and (counts - 1250).abs().max() < 171
    assert torch.equal(draws[:7, :3], problem.draws(7, 3, seed=1))


def test_the_constants_bound_what_they_should():
    problem, w = random_kinks(3), points()
    every = torch.stack([problem.sample(w, torch.full((200,), k)) for k in range(16)])
    assert torch.linalg.matrix_norm(every, 2).max() <= problem.gradient_bound
    second = (every @ every.mT).mean(0)
    gram = 1.25**2 * (problem.measurements @ problem.measurements.mT).mean(0)
    assert torch.linalg.eigvalsh(gram - second).min() >= -1e-12
    values, vectors = torch.linalg.eigh(gram)
    root = (vectors * values.sqrt()) @ vectors.mT
    assert problem.q_nuclear == pytest.approx(root.trace().item(), rel=1e-12)


def test_resistance_climbs_against_the_second_row():
    start = torch.zeros(1, 2, 3, dtype=F64)
    walk = Resistance(start, height=1.0, slope=1.0, resistance=2.0)
    first = walk.gradient(start)
    assert first[0].tolist() == [[1.0, 0, 0], [0, 1.0, 0]] and walk.height.item() == 1.0
    moved = start.clone()
    moved[0, 0, 0], moved[0, 1, 2] = -0.25, 0.1
    answer = walk.gradient(moved)
    assert answer[0].tolist() == [[1.0, 0, 0], [0, 0, 2.0]]
    assert walk.height.item() == pytest.approx(1 - 0.25 + 0.2)
    moved[0, 0, 0] = -2.0
    walk.gradient(moved)
    assert walk.height.item() < 0
    assert not walk.gradient(moved).any()
