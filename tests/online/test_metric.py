"""Quadratic programs over vectors against cvxpy, closed forms and their optimality conditions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.online.metric import Metric

F64 = torch.float64


def problem(d, seed, *, rank=None, condition=1e2, push=1.0):
    """A metric of that rank and condition number, and a linear term in its range."""
    rng = np.random.default_rng(seed)
    rank = d if rank is None else rank
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    weight = np.zeros(d)
    weight[:rank] = condition ** -rng.uniform(0, 1, rank)
    linear = push * basis @ ((weight > 0) * rng.standard_normal(d))
    return Metric(torch.from_numpy(weight), torch.from_numpy(basis)), torch.from_numpy(linear)


def relative_gap(metric, linear, x, ball, radius):
    """(⟨∇f, x⟩ + r‖∇f‖_dual)/(−f(x)), by NumPy."""
    h, c, x = metric.weight.numpy(), linear.numpy(), x.numpy()
    v = None if metric.basis is None else metric.basis.numpy()
    bent = h * x if v is None else v @ (h * (v.T @ x))
    slope = c + bent
    dual = np.linalg.norm(slope) if ball == "l2" else np.abs(slope).sum()
    return (slope @ x + radius * dual) / max(-(c @ x + bent @ x / 2), 1e-300)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    d=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    deficient=st.booleans(),
    condition=st.sampled_from([1.0, 1e2, 1e6]),
    push=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
    ball=st.sampled_from(["l2", "linf"]),
)
def test_the_minimizer_is_feasible_and_has_no_gap(d, seed, deficient, condition, push, ball):
    rank = max(1, d // 2) if deficient else d
    metric, linear = problem(d, seed, rank=rank, condition=condition, push=push)
    x = metric.minimize(linear, ball, 0.7)
    norm = torch.linalg.vector_norm(x, ord=2 if ball == "l2" else torch.inf)
    assert norm <= 0.7 * (1 + 1e-12)
    # Rounding of ∇f, d·eps of its terms, is weighed by the radius; −f ≥ half of ⟨c, x⟩.
    slack = 1e-15 * d * 0.7 * float(linear.abs().sum())
    value = float(linear @ x + x @ metric.apply(x) / 2)
    assert relative_gap(metric, linear, x, ball, 0.7) <= 1e-8 + 4 * slack / max(-value, 1e-300)


def test_diagonal_metrics_in_closed_form():
    weight = torch.tensor([1.0, 2.0, 0.0], dtype=F64)
    linear = torch.tensor([3.0, -1.0, 0.0], dtype=F64)
    box = Metric(weight).minimize(linear, "linf", 1.0)
    assert torch.equal(box, torch.tensor([-1.0, 0.5, 0.0], dtype=F64))
    equal = Metric(torch.full((3,), 2.0, dtype=F64))
    np.testing.assert_allclose(
        equal.minimize(linear, "l2", 0.5), -0.5 * linear / linear.norm(), rtol=1e-14
    )
    assert torch.equal(equal.minimize(linear, "l2", 10.0), -linear / 2)
    # Two axes: x_i = −c_i/(w_i + λ), checked by its optimality conditions.
    ball = Metric(weight).minimize(linear, "l2", 1.0)
    slope = linear + weight * ball
    assert ball.norm().item() == pytest.approx(1.0, abs=1e-14)
    np.testing.assert_allclose(slope, -(slope.norm() * ball), atol=1e-13)


def test_coordinates_without_weight_stay_at_zero():
    metric, linear = problem(6, 8, rank=3, push=1e-3)
    # What rounding puts into the kernel must not send x to the border there.
    x = metric.minimize(linear + 1e-17, "l2", 100.0)
    kernel = metric.basis[:, 3:]
    assert (kernel.mT @ x).abs().max() <= 1e-13 * x.norm()


def test_newton_reaches_rounding_on_the_sphere():
    rng = np.random.default_rng(0)
    for _ in range(300):
        d, spread = int(rng.choice([2, 3, 10, 300, 3000])), rng.uniform(0, 12)
        weight = torch.from_numpy(10 ** rng.uniform(-spread, 2, d))
        size = 10 ** (rng.uniform(-rng.uniform(0, 6), 0, d) + rng.uniform(-3, 3))
        linear = torch.from_numpy(size * rng.standard_normal(d))
        metric = Metric(weight)
        x = metric.minimize(linear, "l2", 1.0)
        # Sums of d terms in float64.
        assert relative_gap(metric, linear, x, "l2", 1.0) <= 1e-12


@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_the_box_program_ends_after_a_few_faces(condition):
    for seed in range(20):
        metric, linear = problem(10, seed, condition=condition, push=0.1)
        x = metric.minimize(linear, "linf", 0.5, max_iterations=25)
        assert relative_gap(metric, linear, x, "linf", 0.5) <= 1e-8


def test_rounding_in_the_kernel_is_dropped_next_to_the_border():
    # ‖free‖ exceeds the radius by one rounding, so λ ≈ 2e-16, and 1e-17/λ is 0.05.
    metric = Metric(torch.tensor([1.0, 0.0], dtype=F64))
    linear = torch.tensor([1.0 + 2.0**-52, 1e-17], dtype=F64)
    np.testing.assert_allclose(metric.minimize(linear, "l2", 1.0), [-1.0, 0.0], atol=1e-15)
