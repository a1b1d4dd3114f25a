"""A certificate measures what was played, and holds only within its theorem."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from helpers import nuclear, operator
from nucleon.online import learners, streams, theory
from nucleon.online.game import play
from nucleon.online.learners import (
    FAML,
    FTL,
    FTPL,
    FTRL,
    GBPA,
    GaussianFTPL,
    OneSidedShampoo,
)
from nucleon.online.potentials import (
    Admissibility,
    Hyperbolic,
    Nuclear,
    Potential,
)
from nucleon.online.regret import BoxLedger, Ledger

F64 = torch.float64
SHAPE = (2, 3)


def gaussian(shape=SHAPE, **options):
    return streams.gaussian(shape, dtype=F64, **options)


def played(learner, rounds=8, **options):
    """A learner's certificate after a game against fixed gradients."""
    play(learner, gaussian(learner.shape), rounds)
    return learner.certificate(**options)


# ---- what is measured --------------------------------------------------------------------------


def test_copies_and_pickles_play_on_with_their_certificate():
    learner = FTRL(SHAPE, dtype=F64)
    play(learner, gaussian(), 3)
    for other in (copy.deepcopy(learner), copy.copy(learner), pickle.loads(pickle.dumps(learner))):
        other.play()
        other.observe(gaussian().gradient(4), oblivious=True)
        assert other.rounds == 4 and other.certificate().holds
    assert learner.rounds == 3 and learner.certificate().holds


def test_a_class_may_name_a_theorem_of_its_own():
    own = type("Own", (FAML,), {"theorem": "a theorem of its own"})
    assert played(own(SHAPE, dtype=F64)).theorem == "a theorem of its own"
    none = played(type("None", (FAML,), {"theorem": "none"})(SHAPE, dtype=F64))
    assert not none.holds and "no theorem" in none.refusal


# ---- adaptive rounds ---------------------------------------------------------------------------


@pytest.mark.parametrize("save", [False, True])
def test_adaptive_rounds_are_not_forgotten(save):
    shape = (1, 4)
    learner = FTPL(shape, dtype=F64)
    learner.play()
    learner.observe(gaussian(shape).gradient(1))  # not said to be fixed
    assert "may depend on the noise" in learner.certificate().refusal
    play(learner, streams.adversary(shape, dtype=F64), 20)
    if save:
        state, learner = learner.state_dict(), FTPL(shape, dtype=F64)
        learner.load_state_dict(state)
    trace = play(learner, gaussian(shape), 20)
    assert not trace.oblivious and not trace.certificate.holds
    assert "may depend on the noise" in trace.certificate.refusal


def test_an_oblivious_stream_does_not_see_the_actions():
    class Lying:
        name, shape, gradient_bound, oblivious, rounds = "lying", SHAPE, 1.0, True, None

        def gradient(self, t, action=None):
            return action / operator(action)

    with pytest.raises(AttributeError, match="NoneType"):
        play(FTPL(SHAPE, dtype=F64), Lying(), 3)


# ---- bounds that are none ----------------------------------------------------------------------


def test_a_learner_without_a_bound_is_refused_in_words():
    class Unbounded(learners.Learner):
        name, theorem = "unbounded", "a conjecture"

        def bound(self):
            return torch.full(self.shape[:-2], torch.inf, dtype=F64)

        def action(self):
            return torch.zeros(self.shape, dtype=self.dtype)

        def update(self, gradient):
            pass

    certificate = played(Unbounded(SHAPE, dtype=F64))
    assert not certificate.holds and "finite bound" in certificate.refusal
    assert "no constants" in played(GBPA(SHAPE, Nuclear(), dtype=F64)).refusal


# ---- actions outside the ball ------------------------------------------------------------------


class Stretched(Potential):
    """Hyperbolic smoothing times a factor: nothing keeps its gradient in the ball."""

    def __init__(self, factor):
        self.factor = factor

    def value(self, s, smoothing):
        return self.factor * Hyperbolic().value(s, smoothing)

    def gradient(self, s, smoothing):
        return self.factor * Hyperbolic().gradient(s, smoothing)

    def admissibility(self, m, n):
        return Admissibility(50.0, 50.0)  # a bound that any regret is below


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), SHAPE, (3, 2), (2, 2, 3)], ids=str)
def test_actions_outside_the_ball_are_not_certified(shape, dtype):
    norms = {}
    for factor in (1.0, 4.3):
        learner = GBPA(shape, Stretched(factor), eta=1e3, radius=0.5, dtype=dtype)
        trace = play(learner, streams.alternating(shape, dtype=dtype), 6, record=1)
        norms[factor] = trace.norm.max().item()
        certificate = learner.certificate()
        assert certificate.holds == (factor == 1.0) == trace.certificate.holds
        assert (certificate.regret <= certificate.bound).all()
    assert norms[1.0] <= 0.5 < 2 < norms[4.3]
    assert f"norm {norms[4.3]:.6g}, outside the ball of radius 0.5" in certificate.refusal


@pytest.mark.parametrize("excess", [2e-9, 1e-6, 1e-3])
def test_a_norm_above_the_radius_by_more_than_rounding_is_noticed(excess):
    rng = np.random.default_rng(3)
    for shape in [(4, 6), (6, 4), (1, 5), (3, 4, 4)]:
        x = torch.from_numpy(rng.standard_normal(shape))
        x = x / torch.linalg.matrix_norm(x, ord=2, keepdim=True).amax()
        for radius in (1e-200, 1.0, 1e200):
            for factor, noticed in ((1 + excess, True), (1 + 1e-12, False)):
                ledger = Ledger(shape, radius=radius)
                ledger.record(torch.zeros(shape, dtype=F64), radius * factor * x)
                assert bool((ledger.outside > 0).any()) == noticed
    one = torch.eye(2, dtype=F64)
    for ledger in (Ledger((2, 2)), BoxLedger((2, 2))):
        ledger.record(one, one)
        assert not ledger.outside.any()
        ledger.record(one, (1 + excess) * one)
        ledger.record(one, one)  # a step out of the ball is not forgotten
        assert ledger.outside.item() == pytest.approx(1 + excess, rel=1e-12)


# ---- high probability --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "k", "redraw"),
    [
        (lambda **o: FTPL((3, 5), samples=4, **o), 4, True),
        (lambda **o: FTPL((5, 3), samples=4, antithetic=True, **o), 2, True),
        (lambda **o: FTPL((3, 5), samples=4, redraw=False, **o), 4, False),
    ],
)
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_bound_of_one_draw_by_hand(make, k, redraw, discount):
    learner, delta, rounds = make(radius=2.0, discount=discount, dtype=F64), 0.01, 12
    source = gaussian(learner.shape)
    trace = play(learner, source, rounds, delta=delta)
    norms = np.array([nuclear(source.gradient(t).numpy()) for t in range(2, rounds + 1)])
    norms = norms * discount ** np.arange(rounds - 2, -1, -1)  # X_1 = 0 is no draw
    size = math.sqrt((norms**2).sum()) if redraw else norms.sum()
    added = 2.0 * math.sqrt(2 * math.log(1 / delta) / k) * size
    assert trace.bound[-1].item() == pytest.approx(learner.bound().item() + added, rel=1e-12)
    certificate = trace.certificate
    assert certificate.holds
    assert "probability at least 0.99" in certificate.theorem and trace.delta == delta
    assert "in the mean" in learner.certificate().theorem


def test_against_adaptive_gradients_it_says_so_or_refuses():
    shape, delta = (2, 4), 0.05
    learner = FTPL(shape, samples=64, dtype=F64)
    play(learner, streams.adversary(shape, dtype=F64), 30)
    assert "delta" in learner.certificate().refusal
    certificate = learner.certificate(delta=delta)
    assert certificate.refusal is None and certificate.holds
    assert "linear in T" in certificate.theorem
    added = theory.ftpl_adaptive_deviation(
        learner.nuclear_sum[None], rows=2, columns=4, radius=1.0, samples=64, delta=delta, rounds=30
    )
    assert certificate.bound.item() == pytest.approx((learner.bound() + added).item(), rel=1e-12)
    fixed = FTPL(shape, redraw=False, dtype=F64)
    play(fixed, streams.adversary(shape, dtype=F64), 5)
    assert "one draw" in fixed.certificate(delta=delta).refusal


def test_games_of_a_batch_share_the_probability():
    learner = FTPL((3, 2, 4), samples=2, dtype=F64)
    play(learner, gaussian((3, 2, 4)), 10)
    alone = learner.nuclear_square.sqrt()[:, None]
    added = theory.ftpl_oblivious_deviation(alone, radius=1.0, samples=2, delta=0.1 / 3)
    torch.testing.assert_close(learner.certificate(delta=0.1).bound, learner.bound() + added)


def test_a_learner_without_noise_needs_no_probability():
    for make in (FAML, FTRL, lambda s, **o: GaussianFTPL((1, 3), **o)):
        learner = make(SHAPE, dtype=F64)
        play(learner, gaussian(learner.shape), 10)
        sure, probable = learner.certificate(), learner.certificate(delta=0.1)
        assert torch.equal(sure.bound, probable.bound) and sure.theorem == probable.theorem
    for bad in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="delta"):
            learner.certificate(delta=bad)


# ---- how tight ---------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_a_certificate_says_how_tight_it_is(discount):
    learner = FAML((2, 3, 4), radius=2.0, discount=discount, dtype=F64)
    trace = play(learner, gaussian((2, 3, 4)), 25)
    certificate = trace.certificate
    torch.testing.assert_close(certificate.share, certificate.regret / certificate.bound)
    trace_of_gram = learner.gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(certificate.lower, 2.0 * (trace_of_gram / 2).sqrt())
    assert ((certificate.lower > 0) & (certificate.lower < certificate.bound)).all()
    worst = certificate.slack.argmin()
    assert f"{100 * certificate.share[worst].item():.3g}% of the bound" in str(certificate)
    assert f"could force {certificate.lower[worst].item():.3g}" in str(certificate)


@pytest.mark.parametrize("make", [FAML, FTRL, FTL, OneSidedShampoo])
def test_some_signs_cost_every_learner_the_lower_bound(make):
    # All 2⁶ signs of six gradients: their mean regret is D·E‖Σε_tG_t‖_*, at least the lower bound.
    gradients = torch.stack([gaussian().gradient(t) for t in range(1, 7)])
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 6)
    learner = make((64, *SHAPE), dtype=F64)
    for t in range(6):
        learner.play()
        learner.observe(signs[:, t, None, None] * gradients[t])
    certificate = learner.certificate()
    expected = nuclear(torch.einsum("bt,tij->bij", signs, gradients).numpy()).mean()
    assert certificate.regret.mean().item() == pytest.approx(expected, rel=1e-6)
    assert certificate.regret.mean() >= certificate.lower[0]
