"""Curvature learned online: the map to the ball, the losses' gradient, and the optimizer."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.online.learners import FAML, FTPL, FTRL, AdaGradOGD, OneSidedShampoo, ScalarGBPA
from nucleon.online.problems import CurvatureLearner, online_quasi_newton
from strategies import F64, FULL, eps, normal, seeds, with_eigenvalues


def hessian(n, mu, L, seed=0):
    """A symmetric matrix with eigenvalues from μ to L, both taken."""
    return with_eigenvalues(torch.linspace(mu, L, n, dtype=F64) if n > 1 else torch.tensor([L]))


def quadratic(n, condition, seed=0, scale=1.0):
    values = scale * torch.logspace(0, -math.log10(condition), n, dtype=F64)
    h, best = with_eigenvalues(values, seed), normal(n, seed=seed + 1)
    return h, (lambda x: h.to(x.dtype) @ (x - best.to(x.dtype))), best


class Recorder(FAML):
    """Keeps the gradients it is fed."""

    def observe(self, gradient, **options):
        super().observe(gradient, **options)
        self.fed = [*getattr(self, "fed", []), gradient]


# ---------------------------------------------------------------------- the learner


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    log_scale=st.floats(-6, 6),
    condition=st.floats(1.5, 1e4),
    rounds=st.integers(1, 12),
    dtype=st.sampled_from(FULL),
    discount=st.sampled_from([1.0, 0.9]),
    seed=seeds,
)
def test_the_game_is_the_one_of_the_losses(n, log_scale, condition, rounds, dtype, discount, seed):
    """Per round: B_t in [μ, L], the loss by NumPy, the fed gradient by autograd through the map."""
    L = 10.0**log_scale
    mu = L / condition
    learner = CurvatureLearner(n, mu=mu, L=L, learner=Recorder, dtype=dtype, discount=discount)
    h = with_eigenvalues(torch.linspace(mu, L, n, dtype=F64), seed)
    total, steps = 0.0, normal(rounds, n, seed=seed).to(dtype)
    rounding = 64 * n * eps(dtype)
    for s in steps:
        y = (h @ s.double()).to(dtype)
        b, x = learner.matrix(), learner.learner.play().double().requires_grad_()
        assert torch.equal(b, b.mT)
        values = np.linalg.eigvalsh(b.double().numpy())
        assert mu - rounding * L <= values[0] and values[-1] <= L + rounding * L
        # ℓ_t as a function of the action itself, in units of (L−μ)²/2.
        mapped = (mu + L) / 2 * torch.eye(n, dtype=F64) + (L - mu) / 2 * (x + x.mT) / 2
        residual = y.double() - mapped @ s.double()
        value = residual.square().sum() / (2 * s.double().square().sum())
        (expected,) = torch.autograd.grad(value / ((L - mu) ** 2 / 2), x)
        loss = learner.observe(s, y)
        total = discount * total + value.item()
        size = rounding * L / (L - mu)  # what rounding of y costs, in units of L−μ
        assert loss.item() == pytest.approx(value.item(), abs=4 * size * (L - mu) ** 2)
        torch.testing.assert_close(
            learner.learner.fed[-1].double(), expected, rtol=0, atol=4 * size
        )
        assert torch.equal(learner.learner.fed[-1], learner.learner.fed[-1].mT)
        assert np.linalg.norm(learner.learner.fed[-1].double().numpy(), 2) <= 1 + rounding
    assert learner.loss.item() == pytest.approx(total, abs=4 * rounds * size * (L - mu) ** 2)
    slack = 8 * rounds * size * L**2
    assert learner.loss_of(h) <= slack  # y = Hs
    certificate = learner.certificate()
    assert certificate.holds  # its regret is of X, the game's of (X + Xᵀ)/2: both up to rounding
    assert learner.loss - learner.loss_of(h) <= certificate.regret + slack


def test_the_regret_is_the_worst_over_the_set():
    """Σ⟨∇ℓ_t(B_t), B_t − B⟩ by hand at its maximizer: B = c·I − r·sign(Σ∇), by NumPy's eigh."""
    mu, L, n = 0.5, 3.0, 4
    learner, h = CurvatureLearner(n, mu=mu, L=L, dtype=F64), hessian(n, mu, L)
    slopes, played = [], []
    for s in normal(9, n, seed=2):
        b = learner.matrix()
        slope = -torch.outer(h @ s - b @ s, s) / (s @ s)
        slopes.append(((slope + slope.mT) / 2).numpy())
        played.append(b.numpy())
        learner.observe(s, h @ s)
    values, vectors = np.linalg.eigh(sum(slopes))
    worst = (mu + L) / 2 * np.eye(n) - (L - mu) / 2 * (vectors * np.sign(values)) @ vectors.T
    expected = sum((g * (b - worst)).sum() for g, b in zip(slopes, played, strict=True))
    assert learner.certificate().regret.item() == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_a_matrix_is_the_sum_over_the_pairs():
    learner, h = CurvatureLearner(3, mu=1.0, L=2.0, dtype=F64, discount=0.7), hessian(3, 1, 2)
    other, expected = with_eigenvalues(torch.tensor([1.0, 1.5, 1.7], dtype=F64), seed=5), 0.0
    for s in normal(6, 3, seed=1):
        learner.observe(s, h @ s)
        expected = 0.7 * expected + ((h - other) @ s).square().sum().item() / (2 * (s @ s).item())
    assert learner.loss_of(other).item() == pytest.approx(expected, rel=1e-12)


def test_a_pair_off_by_rounding_is_drawn_back():
    """y = (L + 1e-9)s is fed as Ls, of which B = LI has no loss; 1e-3 more refutes L."""
    learner, s = CurvatureLearner(3, mu=1.0, L=2.0, dtype=F64), normal(3)
    learner.observe(s, (2 + 1e-9) * s)
    assert learner.loss_of(2 * torch.eye(3, dtype=F64)).item() < 1e-25
    with pytest.raises(ValueError, match=r"contradicts mu=1 and L=2.*larger L"):
        learner.observe(s, 2.001 * s)
    learner.observe(s, 2.001 * s, rounding=0.002 * s.norm().item())
    assert learner.learner.rounds == 2


S = normal(3)


@pytest.mark.parametrize(
    ("s", "y", "error", "message"),
    [
        (0 * S, 0 * S, ValueError, "s must not be zero"),
        (S, 0.9 * S, ValueError, "smaller mu"),
        (S[:2], S[:2], RuntimeError, "size mismatch"),
        (S, S * math.nan, ValueError, "must be finite"),
    ],
)
def test_bad_pairs_are_refused_before_anything_changes(s, y, error, message):
    learner = CurvatureLearner(3, mu=1.0, L=2.0, dtype=F64)
    learner.observe(S, 1.5 * S)
    before = learner.matrix(), learner.loss, learner.learner.rounds
    with pytest.raises(error, match=message):
        learner.observe(s, y)
    assert torch.equal(before[0], learner.matrix())
    assert before[1:] == (learner.loss, learner.learner.rounds)


# ---------------------------------------------------------------------- the optimizer


def minimized(gradient, n, mu=0.1, L=1 + 1e-12, start=0.0, **options):
    start = torch.full((n,), start, dtype=F64)
    return online_quasi_newton(gradient, start, mu=mu, L=L, **options)


@settings(max_examples=10, deadline=None)
@given(
    n=st.integers(1, 12),
    condition=st.floats(2, 200),
    log_scale=st.floats(-3, 3),
    seed=seeds,
)
def test_it_finds_the_minimum_of_a_quadratic(n, condition, log_scale, seed):
    """To ‖∇f‖ ≤ tol, so within tol/μ of the solution; every step contracts by ρ at least."""
    scale = 10.0**log_scale
    _, gradient, best = quadratic(n, condition, seed, scale)
    mu, L = scale / condition, scale * (1 + 1e-12)
    tolerance = 1e-8 * scale
    result = online_quasi_newton(
        gradient, torch.zeros(n, dtype=F64), mu=mu, L=L, tolerance=tolerance
    )
    assert tolerance >= result.history[-1] == gradient(result.x).norm().item()
    assert torch.linalg.vector_norm(result.x - best) <= tolerance / mu
    ratios = [b / a for a, b in itertools.pairwise(result.history)]
    assert max(ratios) <= (L - mu) / (L + mu) + 1e-6
    assert result.evaluations == len(result.history) + result.fallbacks
    assert result.curvature.certificate().holds


@pytest.mark.parametrize("make", [FAML, FTRL, ScalarGBPA, FTPL])
def test_any_learner_beats_gradient_descent(make):
    """At n = 10, L/μ = 100, where gradient descent needs ln(1e8·‖∇f‖)/ln(1/ρ) > 900 gradients.

    Even FTPL, which has no certificate against losses that depend on its draws.
    """
    _, gradient, _ = quadratic(10, 100.0)
    result = minimized(gradient, 10, mu=0.01, learner=make)
    assert result.history[-1] <= 1e-8 and result.evaluations < 300
    assert result.curvature.certificate().holds == (make is not FTPL)


def test_a_failed_trial_falls_back():
    """f = μx²/2 + a steep wall: curvature changes, trials fail, the contraction holds regardless.

    ∇²f = μ + (L−μ)·sech² of each coordinate: between μ and L everywhere.
    """
    mu, L = 0.01, 1.0
    shift = normal(6, seed=3)

    def gradient(x):
        return mu * (x - 3) + (L - mu) * torch.tanh(x - shift)

    result = online_quasi_newton(
        gradient, 20 * torch.ones(6, dtype=F64), mu=mu, L=L, gradient_bound=None, eta=20.0
    )
    assert result.history[-1] <= 1e-8 and result.fallbacks > 0
    assert result.evaluations == len(result.history) + result.fallbacks
    ratios = [b / a for a, b in itertools.pairwise(result.history)]
    assert max(ratios) <= (L - mu) / (L + mu) + 1e-6


def test_it_stops_where_rounding_does():
    """In float32 the gradient cannot get to 1e-30."""
    _, gradient, _ = quadratic(5, 10.0)
    options = {"mu": 0.1, "L": 1.001}
    result = online_quasi_newton(gradient, torch.zeros(5), tolerance=1e-30, **options)
    assert result.history[-1] < 1e-5 and len(result.history) < 10_000
    few = online_quasi_newton(gradient, torch.zeros(5), max_iterations=3, **options)
    assert len(few.history) == 4 and few.history[-1] > 1e-8


def test_a_trial_that_overflows_is_not_taken():
    """∇f is infinite where a first bold step would go; a learner that takes it never comes back."""
    _, gradient, best = quadratic(4, 10.0)
    calls = []

    def cliff(x):
        calls.append(None)
        return gradient(x) * (math.inf if len(calls) == 3 else 1.0)

    result = minimized(cliff, 4)
    assert result.history[-1] <= 1e-8 and result.fallbacks >= 1
    torch.testing.assert_close(result.x, best, rtol=0, atol=1e-7)


def test_a_learner_that_leaves_the_ball_is_named():
    """Without its projection Shampoo plays outside, where B_t may be indefinite."""
    _, gradient, _ = quadratic(8, 1e3)
    with pytest.raises(ValueError, match=r"not positive definite at L/mu = 1e\+03.*FAML"):
        minimized(gradient, 8, mu=1e-3, learner=OneSidedShampoo, projection="none")


def curvature(**options):
    return CurvatureLearner(3, **{"mu": 1.0, "L": 2.0, "dtype": F64, **options})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: curvature(mu=2.0), "mu must be below L"),
        (lambda: curvature(mu=0.0), "mu"),
        (lambda: curvature(L=math.inf), "L"),
        (lambda: curvature(learner=AdaGradOGD), "row"),
        (lambda: minimized(lambda x: x, 4, L=0.5, start=1.0), "larger L"),
        (lambda: minimized(lambda x: x * math.nan, 4), r"gradient\(start\) must be finite"),
    ],
)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
