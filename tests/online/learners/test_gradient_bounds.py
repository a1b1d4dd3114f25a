"""Gradients above the bound: refused, clipped or followed, and what that adds to the regret."""

import math

import numpy as np
import pytest
import torch

from helpers import LEARNERS, actions_of, nuclear
from helpers_states import differences
from nucleon.claims.oracle import twins
from nucleon.online import streams, theory
from nucleon.online.learners import FAML, FTRL

F64 = torch.float64
SHAPE = (3, 5)


def growing(rounds=30, seed=0, rate=1.15):
    """Gradients whose norm grows by `rate` a round, with some at random far above the others."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((rounds, *SHAPE)) * rate ** np.arange(rounds)[:, None, None]
    return torch.from_numpy(g * rng.lognormal(0, 1.5, (rounds, 1, 1)))


def game(learner, gradients):
    actions_of(learner, gradients)
    return learner.certificate()


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("stated", [None, 0.5])
@pytest.mark.parametrize("on_excess", ["clip", "grow"])
def test_excess_is_in_the_bound_also_of_the_first_gradient(on_excess, stated, discount):
    gradients, options = growing(), {"discount": discount}
    learner = FAML(SHAPE, gradient_bound=stated, on_excess=on_excess, dtype=F64, **options)
    certificate = game(learner, gradients)
    twin = twins.excess("FAML", SHAPE, clip=on_excess == "clip", bound=stated, **options)
    bound = float(twin.bound(gradients.numpy()))
    assert certificate.bound.item() == pytest.approx(bound, rel=1e-10)
    assert certificate.holds and certificate.excess > 0


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
    first = nuclear(gradients[2].numpy())
    assert learner.first_nuclear.item() == pytest.approx(first, rel=1e-12)
    a_priori = theory.running_excess_bound(
        rows=3, first_operator=norms[2], largest_operator=norms.max()
    )
    assert learner.excess <= a_priori * (1 + 1e-12)


def test_the_bound_grows_by_default_where_none_is_stated():
    learner = FAML(SHAPE, gradient_bound=None, dtype=F64)
    certificate = game(learner, growing())
    assert learner.on_excess == "grow"
    assert certificate.gradient_bound == certificate.largest == learner.level
    ample = FAML(SHAPE, gradient_bound=1e9, on_excess="grow", dtype=F64)
    assert game(ample, growing()).excess == 0


def test_rounding_of_a_normalized_gradient_is_accepted_and_counted():
    generator = torch.Generator().manual_seed(0)
    learner = FAML((16, 24), dtype=torch.float32)
    excess = 0.0
    for _ in range(20):
        g = torch.randn(16, 24, generator=generator)
        g /= torch.linalg.matrix_norm(g, ord=2)
        excess += np.maximum(np.linalg.svd(g.double().numpy(), compute_uv=False) - 1, 0).sum()
        learner.play()
        learner.observe(g)
    assert 0 < excess < 1e-5
    # Each singular value of a matrix of norm 1 is computed up to a few float64 roundings.
    assert learner.excess.item() == pytest.approx(excess, abs=20 * 16 * 2.0**-50)


@pytest.mark.parametrize("on_excess", ["grow", "clip"])
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e-24, torch.float32), (1e25, torch.float32), (1e-140, F64), (1e140, F64)],
    ids=str,
)
def test_the_scale_of_the_gradients_does_not_matter(name, scale, dtype, on_excess):
    # A power of two, so that the same game is played: only over- and underflow could tell.
    scale = 2.0 ** round(math.log2(scale))
    kinds = {"gradient_bound": None, "on_excess": on_excess, "dtype": dtype}
    unit, scaled = LEARNERS[name]((3, 7), **kinds), LEARNERS[name]((3, 7), **kinds)
    stream = streams.adversary((3, 7), kind="orthogonal", dtype=dtype)
    for t in range(1, 31):
        action, same = unit.play(), scaled.play()
        gradient = stream.gradient(t, action)
        unit.observe(gradient)
        scaled.observe(scale * gradient)
    # Rounding in eigenvalues and in iterates of a relative gap of 1e-8 is all that may differ.
    assert torch.dist(action, same) <= 1e-4
    regret = unit.ledger.regret().item()
    assert (scaled.ledger.regret() / scale).item() == pytest.approx(regret, rel=1e-5)
    if name in ("ftrl", "faml"):
        assert scaled.certificate().holds
        assert (scaled.bound() / scale).item() == pytest.approx(unit.bound().item(), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-170, 1e-160, 1e160, 1e200])
@pytest.mark.parametrize("on_excess", ["grow", "clip"])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_gradient_whose_square_float64_cannot_hold_is_refused(name, on_excess, scale):
    learner = LEARNERS[name]((2, 3), gradient_bound=None, on_excess=on_excess, dtype=F64)
    learner.play()
    before = learner.state_dict()
    with pytest.raises(ValueError, match=r"square.*rescale|Gram matrix"):
        learner.observe(torch.full((2, 3), scale, dtype=F64))
    assert not differences(before, learner.state_dict())


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


@pytest.mark.parametrize("rows", [3, 128])  # from 128 on the ledger bounds norms from above
def test_a_game_of_a_batch_begins_with_its_own_first_gradient(rows):
    gradients = torch.eye(rows, rows + 2, dtype=F64).expand(2, 2, -1, -1).clone()
    gradients[0, 1] = 0
    learner = FAML((2, rows, rows + 2), gradient_bound=None, on_excess="clip", dtype=F64)
    certificate = game(learner, gradients)
    assert learner.excess.abs().max() <= 1e-9 * rows
    torch.testing.assert_close(learner.first_nuclear, torch.full((2,), float(rows), dtype=F64))
    assert certificate.holds and (learner.play()[1] != 0).any()


def test_an_understated_bound_is_paid_for():
    # On g_t = (−1000)^t FTRL plays x = −s/(√2·√Σg²) → ∓1/√2 before each jump, loses |g_T|/√2 on it
    # and |s_T| → |g_T| in hindsight: 1 + 1/√2 against √2, if the excess were not in the bound.
    gradients = (-1000.0) ** torch.arange(12, dtype=F64)[:, None, None]
    learner = FTRL((1, 1), gradient_bound=1e-6, validate=False, dtype=F64)
    certificate = game(learner, gradients)
    last = gradients.abs().max().item()
    assert certificate.regret.item() / last == pytest.approx(1 + math.sqrt(0.5), abs=0.01)
    without = (certificate.bound - certificate.excess).item() / last
    assert without == pytest.approx(math.sqrt(2), abs=0.01)
    assert certificate.holds and "exceed gradient_bound=1e-06" in str(certificate)


def test_a_bound_that_is_trained_is_taken_without_its_graph():
    bound = torch.tensor(2.0, requires_grad=True)
    learner = FAML((2, 3), gradient_bound=bound)
    assert not learner.level.requires_grad and learner.level == 2
    with torch.no_grad():
        bound.fill_(1e-3)
    assert learner.level == 2
