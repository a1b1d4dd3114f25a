"""The two classical applications: what their claims measure."""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from nucleon.claims.applications import app_quasi_newton, app_rotations
from nucleon.claims.applications.app_rotations import Procrustes, ProjectedDescent
from nucleon.online import streams
from nucleon.online.game import play
from nucleon.online.problems import Registration, SignRounding

F64 = torch.float64


# ---------------------------------------------------------------------- rotations


@pytest.mark.parametrize("window", [None, 3])
def test_procrustes_is_scipys_on_the_scans_it_remembers(window):
    stream, player = Registration(seed=2), Procrustes(3, window=window)
    assert not player.matrix().any()
    scans = [stream.pairs(t) for t in range(1, 8)]
    for u, v in scans:
        player.observe(u, v)
    kept = scans if window is None else scans[-window:]
    u, v = (torch.cat([scan[i] for scan in kept]).numpy() for i in (0, 1))
    expected = orthogonal_procrustes(u, v)[0].T
    np.testing.assert_allclose(player.matrix().numpy(), expected, rtol=0, atol=1e-12)


def test_an_odd_window_is_wrong_every_time_on_half_turns():
    """Its sum has the sign of the last scan, so two of three dimensions cost 2 instead of 0."""
    stream = Registration(**app_rotations.STREAMS["3-D scans, half turns"])
    player, losses = Procrustes(3, window=21), []
    for t in range(1, 61):
        u, v = stream.pairs(t)
        losses.append(1 - (player.matrix() * (v.mT @ u)).sum().item() / len(u))
        player.observe(u, v)
    assert min(losses[31:]) > 1.1  # blind: 1; 4/3 for directions spread evenly


def test_the_variance_of_a_draw_is_the_one_of_all_signs():
    x = torch.tensor([[0.6, 0.3, 0], [-0.2, 0.5, 0.1], [0, 0.1, -0.4]], dtype=F64)
    u, v = Registration().pairs(1)
    gradient = -(v.mT @ u) / len(u)
    apart, found = app_rotations.draw(x, gradient, torch.Generator().manual_seed(0))
    rounding = SignRounding.of(x)
    values, chances = [], []
    for signs in torch.cartesian_prod(*3 * [torch.tensor([1.0, -1.0], dtype=F64)]):
        values.append((rounding.matrix(signs) * gradient).sum().item())
        chances.append(((1 + signs * rounding.sigma) / 2).prod().item())
    mean = np.average(values, weights=chances)
    variance = np.average((np.array(values) - mean) ** 2, weights=chances)
    assert mean == pytest.approx((x * gradient).sum().item(), rel=1e-12)
    assert found == pytest.approx(variance, rel=1e-12)
    assert min(abs(value - mean - apart) for value in values) < 1e-12


@pytest.mark.parametrize("name", ["alternating", "gaussian", "drifting", "adversary"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 2), (2, 3, 3)])
def test_projected_descent_is_within_its_bound(name, shape):
    trace = play(
        ProjectedDescent(shape, dtype=F64), getattr(streams, name)(shape, dtype=F64, seed=1), 60
    )
    assert trace.certificate.holds and trace.norm.max() <= 1 + 1e-12


def test_projected_descent_by_hand():
    learner = ProjectedDescent((1, 2), dtype=F64)
    for gradient in ([3.0, 0.0], [0.0, 4.0]):
        learner.play()
        learner.observe(torch.tensor([gradient], dtype=F64))
    # √2·(−1, 0) is cut to (−1, 0); then √2/5·(0, −4) is added and the sum cut again.
    second = np.array([-1, -4 * math.sqrt(2) / 5])
    expected = second / np.linalg.norm(second)
    np.testing.assert_allclose(learner.play().numpy()[0], expected, rtol=1e-14)
    assert learner.bound().item() == pytest.approx(2 * math.sqrt(2) * 5)


# ---------------------------------------------------------------------- quasi-Newton


@pytest.mark.parametrize("make", ["quadratic", "digits"])
def test_the_objectives_are_what_they_say(make):
    """The gradient and the constants against autograd and its Hessian at two points."""
    objective = (
        app_quasi_newton.quadratic(12, 50.0, 3)
        if make == "quadratic"
        else app_quasi_newton.digits(0.01)
    )
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 0.3):
        x = scale * torch.randn(len(objective.start), dtype=F64, generator=generator)
        x.requires_grad_()
        (expected,) = torch.autograd.grad(objective.value(x), x)
        torch.testing.assert_close(objective.gradient(x), expected, rtol=1e-10, atol=1e-13)
        hessian = torch.autograd.functional.hessian(objective.value, x.detach())
        values = np.linalg.eigvalsh(hessian.numpy())
        assert objective.mu * (1 - 1e-9) <= values[0] and values[-1] <= objective.L * (1 + 1e-9)
        if objective.hessian is not None:
            torch.testing.assert_close(hessian, objective.hessian, rtol=0, atol=1e-13)


def test_gradient_descent_takes_what_theory_says():
    """On a quadratic ρ = (κ−1)/(κ+1) a step in the slowest of the two ends, exactly."""
    objective = app_quasi_newton.quadratic(2, 10.0, 0)
    run = app_quasi_newton.descent(objective)
    rate = (run["final"] / run["_history"][0]) ** (1 / run["iterations"])
    assert rate == pytest.approx(9 / 11, rel=1e-6)
    assert run["evaluations"] == run["iterations"] + 1


@pytest.mark.parametrize("method", ["BFGS", "L-BFGS-B"])
def test_scipy_is_stopped_at_the_first_small_two_norm(method):
    run = app_quasi_newton.scipy_run(app_quasi_newton.quadratic(20, 50.0, 1), method)
    assert run["final"] <= 1e-8 < min(run["_history"][:-1])
    assert run["iterations"] <= run["evaluations"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)
    with pytest.raises(ImportError, match="pip install scipy"):
        Procrustes(3)
