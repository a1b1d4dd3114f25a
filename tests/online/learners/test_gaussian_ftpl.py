"""Vector FTPL against SciPy's hypergeometric function, Monte Carlo and its bound."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from helpers import OBLIVIOUS, STREAMS, ledger_of, rounds_of
from nucleon import noise
from nucleon.online import streams, theory
from nucleon.online.learners.gaussian_ftpl import GaussianFTPL, mean_cosine
from nucleon.online.regret import Ledger

F64 = torch.float64
SHAPES = [(1, 2), (1, 5), (5, 1), (2, 1, 4)]


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


@pytest.mark.parametrize("d", [2, 7])
def test_the_mean_length_by_monte_carlo(d):
    # 10⁵ draws: the mean of values in [−1, 1] errs by under 5/√10⁵ = 0.016.
    u = noise.normal((100_000, d), seed=1, dtype=F64)
    for ratio in (0.3, 2.0):
        moved = u + ratio * torch.eye(d, dtype=F64)[0]
        cosine = (moved[:, 0] / moved.norm(dim=1)).mean()
        assert abs(cosine - mean_cosine(torch.tensor(ratio, dtype=F64), d)) <= 0.016


def test_the_action_by_hand():
    gradients = torch.from_numpy(np.random.default_rng(0).uniform(-0.4, 0.4, (6, 1, 3)))
    learner = GaussianFTPL((1, 3), radius=2.0, gradient_bound=0.9, dtype=F64)
    alpha, beta = theory.gaussian_ftpl_constants(3)
    total, square = np.zeros(3), 0.0
    for g in gradients.numpy()[:, 0]:
        learner.play()
        learner.observe(torch.from_numpy(g[None]))
        total, square = total + g, square + g @ g
        level = math.sqrt((0.81 + square) * beta / alpha)
        length = kummer(np.linalg.norm(total) / level, 3)
        expected = -2.0 * length * total / np.linalg.norm(total)
        np.testing.assert_allclose(learner.play().numpy()[0], expected, rtol=1e-10)
    first = np.linalg.norm(gradients[0])
    by_hand = theory.gaussian_ftpl_bound(
        torch.tensor(square), dimension=3, radius=2.0, gradient_bound=0.9, first_norm=first
    )
    assert learner.bound().item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert learner.eta == pytest.approx(math.sqrt(alpha / beta))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
def test_the_mean_is_certified_against_every_stream(stream, shape):
    source = STREAMS[stream](shape, bound=1.5, dtype=F64)
    learner = GaussianFTPL(shape, radius=2.5, gradient_bound=1.5, dtype=F64)
    ledger = Ledger(shape, radius=2.5)
    for gradient, action in rounds_of(learner, source, 30):
        assert torch.linalg.vector_norm(action.flatten(-2), dim=-1).max() <= 2.5 * (1 + 1e-9)
        ledger.record(gradient, action)
    certificate = learner.certificate()
    assert certificate.holds


def test_samples_average_to_the_mean():
    games, d = 200, 4
    gradients = torch.from_numpy(np.random.default_rng(1).uniform(-0.4, 0.5, (5, 1, d)))
    exact = GaussianFTPL((1, d), dtype=F64)
    drawn = GaussianFTPL((games, 1, d), samples=20, dtype=F64)
    for gradient in gradients:
        exact.play(), drawn.play()
        exact.observe(gradient)
        drawn.observe(gradient.expand(games, 1, d).contiguous())
    # 4,000 unit vectors: each coordinate of their mean errs by under 5/√4000.
    assert (drawn.play().mean(0) - exact.play()).abs().max() <= 5 / math.sqrt(4000)
    norms = torch.linalg.vector_norm(GaussianFTPL((1, d), samples=1, dtype=F64).play())
    assert norms == 0
    one = GaussianFTPL((1, d), samples=1, dtype=F64)
    one.play()
    one.observe(gradients[0])
    assert torch.linalg.vector_norm(one.play()).item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("stream", OBLIVIOUS[:4])
def test_mean_regret_of_samples_is_under_the_bound(stream):
    games, d, rounds = 40, 5, 30
    source = STREAMS[stream]((1, d), dtype=F64)
    learner = GaussianFTPL((games, 1, d), samples=1, dtype=F64)
    ledger = Ledger((games, 1, d))
    for t in range(1, rounds + 1):
        gradient = source.gradient(t).expand(games, 1, d).contiguous()
        ledger.record(gradient, learner.play())
        learner.observe(gradient, oblivious=True)
    certificate = learner.certificate()
    regret = certificate.regret.numpy()
    error = scipy.stats.t.ppf(0.999, games - 1) * regret.std(ddof=1) / math.sqrt(games)
    assert regret.mean() + error <= certificate.bound[0].item()
    assert "in the mean" in certificate.theorem


def test_one_sample_against_an_adaptive_stream_is_not_certified():
    stream = streams.adversary((1, 4), dtype=F64)
    learner = GaussianFTPL((1, 4), samples=1, dtype=F64)
    ledger_of(learner, stream, 400)
    certificate = learner.certificate()
    assert certificate.refusal is not None and not certificate.holds
    assert certificate.regret > certificate.bound  # linear: the answer to a unit vector costs 1
    exact = GaussianFTPL((1, 4), dtype=F64)
    ledger_of(exact, stream, 400)
    assert exact.certificate().holds


@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_resumed_game_repeats_bit_for_bit(samples, shape, tmp_path):
    stream = streams.gaussian(shape, dtype=F64)
    learner = GaussianFTPL(shape, samples=samples, seed=3, dtype=F64)
    for _ in rounds_of(learner, stream, 4):
        pass
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    resumed = GaussianFTPL(shape, samples=samples, seed=3, dtype=F64)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for (_, x), (_, y) in zip(
        rounds_of(learner, stream, 4), rounds_of(resumed, stream, 4), strict=True
    ):
        assert torch.equal(x, y)
    with pytest.raises(ValueError, match="the state has samples"):
        GaussianFTPL(shape, samples=5, seed=3, dtype=F64).load_state_dict(learner.state_dict())


def test_bad_input():
    for shape in [(2, 3), (1, 1), (4, 2, 3)]:
        with pytest.raises(ValueError, match="row"):
            GaussianFTPL(shape)
    with pytest.raises(ValueError, match="samples"):
        GaussianFTPL((1, 3), samples=0)
    with pytest.raises(TypeError, match="seed"):
        GaussianFTPL((1, 3), seed=0.5)
    for stream, error in ((-1, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match="stream"):
            GaussianFTPL((1, 3), samples=2, stream=stream)
    learner = GaussianFTPL((1, 3), dtype=F64)
    learner.play()
    with pytest.raises(ValueError, match="gradient_bound"):
        learner.observe(torch.ones(1, 3, dtype=F64))
    assert learner.rounds == 0 and not learner.total.any()
