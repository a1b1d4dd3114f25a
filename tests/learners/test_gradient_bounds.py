"""Gradients above the bound: refused, clipped or followed, and what that adds to the regret."""

import numpy as np
import pytest
import torch

from helpers import LEARNERS, ledger_of, root
from nucleon import streams, theory
from nucleon.learners import FAML, FTRL
from nucleon.regret import Ledger

F64 = torch.float64
SHAPE = (3, 5)


def growing(rounds=30, seed=0, rate=1.15):
    """Gradients whose norm grows by `rate` a round, with some at random far above the others."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((rounds, *SHAPE)) * rate ** np.arange(rounds)[:, None, None]
    return torch.from_numpy(g * rng.lognormal(0, 1.5, (rounds, 1, 1)))


def game(learner, gradients):
    ledger = Ledger(learner.shape, radius=learner.radius, discount=learner.discount)
    for gradient in gradients:
        ledger.record(gradient, learner.play())
        learner.observe(gradient)
    return learner.certificate(ledger, oblivious=True)


def reference(gradients, *, clip, stated, discount, radius):
    """The bound of Theorem 3.2 with its excess, for α = β = 1, from NumPy's SVD alone."""
    level, excess, begun = stated or 0.0, 0.0, False
    gram = np.zeros((3, 3))
    for g in gradients.numpy():
        u, sigma, vt = np.linalg.svd(g, full_matrices=False)
        fixed = clip and stated is not None
        limit = level if begun or fixed else max(level, sigma[0])
        excess = discount * excess + np.maximum(sigma - limit, 0).sum()
        fed = (u * np.minimum(sigma, limit)) @ vt if clip else g
        level = level if fixed else max(level, sigma[0])
        gram = discount**2 * gram + fed @ fed.T
        begun = True
    trace = root(gram + (level / discount) ** 2 * np.eye(3)).trace()
    return radius * (2 * trace + 2 * excess), excess, gram


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("stated", [None, 2.0])
@pytest.mark.parametrize("on_excess", ["clip", "grow"])
def test_excess_is_in_the_bound(on_excess, stated, discount):
    gradients = growing()
    learner = FAML(
        SHAPE,
        radius=1.5,
        gradient_bound=stated,
        on_excess=on_excess,
        discount=discount,
        dtype=F64,
    )
    certificate = game(learner, gradients)
    bound, excess, gram = reference(
        gradients, clip=on_excess == "clip", stated=stated, discount=discount, radius=1.5
    )
    assert excess > 0
    assert certificate.bound.item() == pytest.approx(bound, rel=1e-10)
    np.testing.assert_allclose(learner.gram, gram, rtol=1e-9, atol=1e-9 * gram.max())
    assert certificate.holds
    assert bool(certificate.conditional_on) == (on_excess == "grow")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("on_excess", ["clip", "grow"])
@pytest.mark.parametrize("name", ["ftrl", "faml"])
def test_unknown_bounds_are_certified_after_the_fact(name, on_excess, seed):
    learner = LEARNERS[name](SHAPE, gradient_bound=None, on_excess=on_excess, dtype=F64)
    gradients = growing(seed=seed, rate=1.3)
    gradients[:2] = 0  # the game begins with the first gradient that is not zero
    certificate = game(learner, gradients)
    assert certificate.holds
    norms = np.linalg.norm(gradients.numpy(), ord=2, axis=(1, 2))
    assert learner.level.item() == pytest.approx(norms.max(), rel=1e-12)
    assert learner.first_round.item() == 3
    a_priori = theory.running_excess_bound(
        rows=3, first_operator=norms[2], largest_operator=norms.max()
    )
    assert learner.excess <= a_priori * (1 + 1e-12)


def test_none_tracks_by_default_and_its_certificate_is_conditional():
    learner = FAML(SHAPE, gradient_bound=None, dtype=F64)
    assert learner.on_excess == "grow"
    (condition,) = game(learner, growing()).conditional_on
    assert "not known beforehand" in condition
    unconditional = FAML(SHAPE, gradient_bound=None, on_excess="clip", dtype=F64)
    assert game(unconditional, growing()).conditional_on == ()


def test_a_stated_bound_that_was_never_exceeded_is_unconditional():
    learner = FAML(SHAPE, gradient_bound=1e9, on_excess="grow", dtype=F64)
    assert game(learner, growing()).conditional_on == ()
    assert learner.excess == 0


def test_a_gradient_above_a_stated_bound_is_refused_by_default():
    learner = FAML(SHAPE, gradient_bound=1.0, dtype=F64)
    gradient = torch.zeros(SHAPE, dtype=F64)
    gradient[0, 0], gradient[1, 1] = 1.0, 1.0  # Frobenius norm √2, operator norm 1: within
    learner.play()
    learner.observe(gradient)
    learner.play()
    with pytest.raises(
        ValueError, match=r"operator norm 1\.5, above gradient_bound=1; .*on_excess"
    ):
        learner.observe(1.5 * gradient)
    assert learner.rounds == 1


def test_rounding_of_a_normalized_gradient_is_not_an_excess():
    generator = torch.Generator().manual_seed(0)
    learner = FAML((16, 24), dtype=torch.float32)
    for _ in range(20):
        g = torch.randn(16, 24, generator=generator)
        learner.play()
        learner.observe(g / torch.linalg.matrix_norm(g, ord=2))


def test_games_of_a_batch_have_their_own_bounds():
    bounds = torch.tensor([1.0, 100.0], dtype=F64)
    gradients = torch.stack([growing(10), growing(10, seed=1)], dim=1)
    learner = FAML((2, *SHAPE), gradient_bound=bounds, on_excess="clip", dtype=F64)
    certificate = game(learner, gradients)
    for i, bound in enumerate(bounds.tolist()):
        alone = FAML(SHAPE, gradient_bound=bound, on_excess="clip", dtype=F64)
        single = game(alone, gradients[:, i])
        torch.testing.assert_close(certificate.bound[i], single.bound)
        torch.testing.assert_close(certificate.regret[i], single.regret)


def test_an_understated_bound_can_break_the_theorem():
    # With validate=False nothing stops a bound that is far too small, Λ is then nearly Σ of the
    # past alone, and the certificate names the condition that failed.
    learner = FAML((1, 1), gradient_bound=1e-6, validate=False, dtype=F64)
    gradients = torch.full((40, 1, 1), 1.0, dtype=F64)
    gradients[1::2] = -1.0
    gradients *= torch.tensor(3.0, dtype=F64) ** torch.arange(40)[:, None, None]
    certificate = game(learner, gradients)
    assert any("validate=False" in condition for condition in certificate.conditional_on)
    tracked = game(FAML((1, 1), gradient_bound=None, dtype=F64), gradients)
    assert tracked.holds and tracked.bound > certificate.bound


def test_zero_gradients_cost_nothing():
    for name, factory in LEARNERS.items():
        learner = factory(SHAPE, gradient_bound=None, dtype=F64)
        certificate = game(learner, torch.zeros(5, *SHAPE, dtype=F64))
        assert not learner.play().any()
        assert certificate.regret == 0
        assert certificate.bound == 0 or name == "ftl"


def test_validation_changes_no_number():
    stream = streams.gaussian(SHAPE, dtype=F64)
    for factory in LEARNERS.values():
        checked, trusting = factory(SHAPE, dtype=F64), factory(SHAPE, dtype=F64, validate=False)
        first, second = ledger_of(checked, stream, 12), ledger_of(trusting, stream, 12)
        assert torch.equal(checked.play(), trusting.play())
        assert torch.equal(first.regret(), second.regret())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"gradient_bound": 0.0}, ValueError, "gradient_bound"),
        ({"gradient_bound": -1.0}, ValueError, "gradient_bound"),
        ({"gradient_bound": float("nan")}, ValueError, "gradient_bound"),
        ({"gradient_bound": torch.tensor([1.0, 2.0])}, ValueError, "gradient_bound"),
        ({"gradient_bound": 1e-30, "dtype": torch.float32}, ValueError, "float64"),
        ({"gradient_bound": None, "on_excess": "raise"}, ValueError, "on_excess"),
        ({"on_excess": "ignore"}, ValueError, "on_excess"),
        ({"eta": 0.0}, ValueError, "eta"),
        ({"radius": -1.0}, ValueError, "radius"),
        ({"discount": 1.5}, ValueError, "discount"),
        ({"dtype": torch.bfloat16}, TypeError, "dtype"),
        ({"surprise": 1}, TypeError, "surprise"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        FTRL((2, 3), **options)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2), (0, 3), (2.0, 3), "ab"], ids=str)
def test_bad_shapes_are_refused(shape):
    with pytest.raises((ValueError, TypeError), match="shape"):
        FAML(shape)
