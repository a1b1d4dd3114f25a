"""‖∇L(W)‖^[ρ] of |x|, linear losses and three corners; its program by a conic solver."""

import cvxpy
import numpy as np
import pytest
import torch

from nucleon.online.problems import random_kinks
from nucleon.online.stationarity import (
    Average,
    _balanced,
    least_average,
    stationarity_gap,
)

F64 = torch.float64
# The search ends above the infimum by what its generations of points leave: a few thousandths.
CLOSE = 5e-3


def nuclear(x):
    return np.linalg.svd(x, compute_uv=False).sum(-1)


def law_of(outcome, w):
    """The points and probabilities of the law that a gap was reached by."""
    left = 1 - outcome.weights.sum().reshape(1)
    return torch.cat([w[None], w + outcome.offsets]), torch.cat([left, outcome.weights])


@pytest.mark.parametrize("w", [1.0, -3.0, 0.2])
@pytest.mark.parametrize("rho", [0.02, 0.5, 2.0])
def test_absolute_value_in_closed_form(w, rho):
    """E sign(Y) ≥ 1 − 2Pr(Y < 0), and Pr(Y < 0)·|w| ≤ E(w−Y)_+ = E|Y−w|/2 ≤ ρ/2."""
    outcome = stationarity_gap(torch.sign, torch.tensor([[w]], dtype=F64), rho=rho)
    closed = max(0.0, 1 - rho / abs(w))
    assert closed - 1e-12 <= outcome.value <= closed + CLOSE
    assert outcome.at_the_point == 1
    assert outcome.distance <= rho


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 2)])
def test_a_linear_loss_has_one_gradient(shape):
    slope = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    outcome = stationarity_gap(lambda y: slope.expand_as(y), torch.zeros_like(slope), rho=3.0)
    assert outcome.value == pytest.approx(nuclear(slope.numpy()), rel=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_three_corners_that_no_pairs_reach(seed):
    """Slope −2A within 0.2 of the corners of a triangle around W, A elsewhere: mass 1/9 at each.

    The corner (cos a, sin a) has the opposite point in the region of A, so a pair gains nothing
    but by its own mass: pairs of mean distance ρ = 1/3 end at 0.375. Three points at 0.8 in the
    directions of the corners cost 3·0.8/9 = 0.267 and average to 0.
    """
    slope = torch.tensor([[1.0, 0.0]], dtype=F64)
    angles = torch.arange(3, dtype=F64) * (2 * torch.pi / 3)
    corners = torch.stack([angles.cos(), angles.sin()], 1).unsqueeze(1)

    def gradient(y):
        distance = torch.linalg.vector_norm(y[:, None] - corners, dim=(-2, -1)).amin(1)
        return slope * (1 - 3 * ((0.21 - distance) / 0.01).clamp(0, 1))[:, None, None]

    result = stationarity_gap(gradient, torch.zeros(1, 2, dtype=F64), rho=1 / 3, seed=seed)
    assert result.value <= CLOSE and result.at_the_point == 1
    assert 0 <= result.gap <= result.value
    points, probabilities = law_of(result, torch.zeros(1, 2, dtype=F64))
    average = (probabilities[:, None, None] * gradient(points)).sum(0)
    assert result.value == pytest.approx(nuclear(average.numpy()), abs=1e-12)


@pytest.mark.parametrize("rho", [0.05, 0.5])
def test_the_law_is_what_it_says(rho):
    problem = random_kinks(3)
    w = 0.4 * torch.eye(2, 8, dtype=F64)
    outcome = stationarity_gap(problem.gradient, w, rho=rho, seed=1)
    points, probabilities = law_of(outcome, w)
    assert probabilities.min() >= 0 and probabilities.sum().item() == pytest.approx(1)
    mean = (probabilities[:, None, None] * points).sum(0)
    torch.testing.assert_close(mean, w, rtol=0, atol=1e-12)
    distances = torch.linalg.matrix_norm(points - w, 2)
    assert outcome.distance == pytest.approx((probabilities * distances).sum().item())
    assert 0 < outcome.distance <= rho
    average = (probabilities[:, None, None] * problem.gradient(points)).sum(0)
    assert outcome.value == pytest.approx(nuclear(average.numpy()), rel=1e-9)
    assert outcome.value < 0.98 * nuclear(problem.gradient(w).numpy())
    again = stationarity_gap(problem.gradient, w, rho=rho, seed=1)
    assert again.value == outcome.value


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_the_mean_distance_is_never_above_the_radius(dtype):
    w = torch.tensor([[1.0, 0.5], [0.2, 2.0]], dtype=dtype)
    for rho in (0.3, 0.5, 1.7):
        result = stationarity_gap(torch.sign, w, rho=rho, pairs=8)
        assert 0 < result.distance <= rho
        # The sums of the program leave 1e-12 of room for their rounding.
        assert result.weights.sum() <= 1


def least_of_cvxpy(here, gradients, offsets):
    """The program as it is printed, by an interior-point solver."""
    lengths = np.linalg.norm(offsets, 2, axis=(1, 2))
    p = cvxpy.Variable(len(offsets), nonneg=True)
    average = here + sum(p[i] * (gradients[i] - here) for i in range(len(offsets)))
    mean = sum(p[i] * offsets[i] for i in range(len(offsets)))
    problem = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.normNuc(average)), [cvxpy.sum(p) <= 1, lengths @ p <= 1, mean == 0]
    )
    return problem.solve(solver=cvxpy.CLARABEL)


@pytest.mark.parametrize(("shape", "count"), [((1, 2), 30), ((2, 3), 30), ((2, 3), 6)])
def test_the_program_is_that_of_a_conic_solver(shape, count):
    """Between the two bounds, which are near; generic offsets, a quarter with mirrored ones."""
    rng = np.random.default_rng(count)
    here, gradients = rng.standard_normal(shape), rng.standard_normal((count, *shape))
    offsets = rng.standard_normal((count, *shape)) * 10 ** rng.uniform(-1, 1, (count, 1, 1))
    if count > 6:  # six alone in six dimensions admit no law but W
        offsets[: count // 4] = -0.5 * offsets[-(count // 4) :]
    least = least_of_cvxpy(here, gradients, offsets)
    arrays = [torch.from_numpy(a) for a in (here, gradients, offsets)]
    nothing = torch.zeros(count, dtype=F64), torch.zeros(2 * here.size + 2, dtype=F64)
    result = least_average(*arrays, Average(*nothing, 0.0), iterations=4000)
    p = result.weights.numpy()
    left = np.linalg.norm(np.einsum("k,kmn->mn", p, offsets), 2)
    lengths = np.linalg.norm(offsets, 2, axis=(1, 2))
    assert p.min() >= 0 and p.sum() + left <= 1 and lengths @ p + left <= 1
    value = nuclear(here + np.einsum("k,kmn->mn", p, gradients - here))
    size = nuclear(gradients - here).max()
    slack = 1e-6 * size  # of the oracle
    assert result.lower - slack <= least <= result.lower + 2e-3 * size
    if count == 6:
        assert least == pytest.approx(nuclear(here), rel=1e-6)
    else:
        assert least - slack <= value + size * left <= least + 2e-3 * size


def test_the_balancing_point_counts():
    """One sample alone is balanced by a point that no program has seen, with its gradient."""
    offsets, weights = torch.tensor([[[2.0, 0.0]]], dtype=F64), torch.tensor([0.25], dtype=F64)
    points, p, distance = _balanced(offsets, weights, 1.0)
    assert torch.equal(points, torch.tensor([[[2.0, 0.0]], [[-1.0, 0.0]]], dtype=F64))
    assert p.tolist() == pytest.approx([0.25, 0.5]) and distance == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rho": 0.0}, "rho"),
        ({"w": torch.zeros(2, 2, 2)}, "w must be one matrix"),
        ({"gradient": lambda y: y[0]}, "gradient must map"),
        ({"gradient": lambda y: y * torch.nan}, "gradient around w"),
    ],
)
def test_bad_arguments_are_named(change, match):
    good = {"gradient": torch.sign, "w": torch.ones(1, 2), "rho": 0.1}
    with pytest.raises(ValueError, match=match):
        stationarity_gap(**{**good, **change})
