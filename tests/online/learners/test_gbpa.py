"""GBPA and its four learners alone, against NumPy's SVD."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from helpers import (
    LEARNERS,
    actions_of,
    ledger_of,
    nuclear,
    operator,
    polar,
    root,
)
from nucleon.claims import beside
from nucleon.claims.oracle import bounds
from nucleon.claims.oracle import learners as oracle
from nucleon.online import potentials, streams
from nucleon.online.admissibility import search_admissibility
from nucleon.online.learners import FAML, FTPL, FTRL, GBPA

F64 = torch.float64


def rank_one_gradients(rounds, shape, seed=0, scale=1.0):
    """Gaussian gradients with a drift, of operator norm at most `scale`."""
    g = np.random.default_rng(seed).standard_normal((rounds, *shape)) + 0.3
    g *= scale / np.linalg.svd(g, compute_uv=False).max()
    return torch.from_numpy(g)


@pytest.mark.parametrize("method", ["newton-schulz", "polar-express", "coupled"])
def test_iterative_methods_play_the_reference(method):
    source = streams.ill_conditioned((5, 8), dtype=F64)
    reference, iterative = FAML((5, 8), dtype=F64), FAML((5, 8), method=method, dtype=F64)
    for t in range(1, 30):
        # SSᵀ + Λ ⪰ I and ⪯ (t² + t + 1)I: at condition 1e3 the iterations keep half of the digits.
        assert torch.dist(iterative.play(), reference.play()) <= 1e-6
        for learner in (reference, iterative):
            learner.observe(source.gradient(t))
    assert iterative.certificate().holds


@pytest.mark.parametrize("log_condition", [0, 3, 6, 7, 9, 14, 24])
def test_faml_keeps_its_promise_at_any_condition(log_condition):
    # From gradients of norm ≤ 1 and G = 1 on, the sums of a long game make cond(SSᵀ + Λ) grow; one
    # eigendecomposition serves up to 1e6, where its error eps·κ uses up the promise.
    shape, scales = (4, 6), 10.0 ** torch.linspace(0, log_condition / 2, 4, dtype=F64)
    learner = FAML((2, *shape), dtype=F64)
    turn = torch.linalg.qr(torch.from_numpy(np.random.default_rng(1).standard_normal((4, 4)))).Q
    gaussians = torch.from_numpy(np.random.default_rng(2).standard_normal((2, *shape)))
    learner.total[0] = turn @ (scales[:, None] * gaussians[0])
    learner.gram[0] = (turn * scales) @ gaussians[1] @ gaussians[1].mT @ (turn * scales).mT
    learner.ledger.rounds = 1
    action = learner.play()
    assert operator(action) <= 1 + 1e-9
    assert not action[1].any()  # the other game has seen nothing but zeros
    augmented = np.hstack([learner.total[0].numpy(), root(learner.smoothing()[0].numpy())])
    error = np.linalg.norm(action[0].numpy() + polar(augmented)[:, :6], 2)
    # One eigendecomposition errs by 4 eps·κ at most, within the promise. Above, Λ itself is only
    # known to eps·‖Λ‖, to action and oracle alike, which moves its smallest directions by eps·κ.
    condition = np.linalg.cond(augmented) ** 2
    assert error <= max(1e-9, 64 * 2.2e-16 * condition)


@pytest.mark.parametrize("redraw", [True, False])
def test_ftpl_plays_the_mean_of_perturbed_leaders(redraw):
    options = {"samples": 6, "seed": 7, "redraw": redraw, "antithetic": True, "width": 9}
    gradients = rank_one_gradients(4, (3, 4))
    actions = actions_of(FTPL((3, 4), dtype=F64, **options), gradients)[:-1]
    direction = oracle.perturbed(beside.drawn((3, 4), **options))
    twin = oracle.gbpa(direction, gradients.numpy(), eta=bounds.eta(bounds.gaussian(3, 9)))
    np.testing.assert_allclose(actions, twin, atol=1e-11)


def test_a_long_discounted_game_does_not_overflow():
    learner = FAML((2, 3), discount=0.5, dtype=F64)
    ledger_of(learner, streams.gaussian((2, 3), dtype=F64), 1200)  # 2^1200 overflows
    certificate = learner.certificate()
    assert certificate.holds and certificate.bound.isfinite() and certificate.regret > 0


def test_unset_dtype_and_device_are_torchs():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert FAML((2, 3)).play().dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert FAML((2, 3)).play().dtype == before


# ---- the gaps of FTRL ----------------------------------------------------------------------------


def test_ftrl_carries_the_gaps_of_a_lazy_solver():
    lazy = FTRL((3, 6), tolerance=0.3, max_iterations=1, discount=0.9, dtype=F64)
    exact, gaps = FTRL((3, 6), discount=0.9, dtype=F64), 0.0
    for gradient in rank_one_gradients(30, (3, 6)):
        x = lazy.play().numpy()
        exact.play()
        if lazy.rounds:
            # −x maximizes ⟨S, ·⟩ − ½Tr·ᵀL·
            slope = lazy.total.numpy() + root((lazy.smoothing()).numpy()) @ x
            gaps += nuclear(slope) + (slope * x).sum()
        gaps *= 0.9
        lazy.observe(gradient)
        exact.observe(gradient)
    assert gaps > 1e-3
    assert (lazy.bound() - exact.bound()).item() == pytest.approx(gaps, rel=1e-4)
    assert lazy.certificate().holds


# ---- gradients above the bound ------------------------------------------------------------------


def growing(rounds=30, seed=0, rate=1.15):
    """Gradients whose norm grows by `rate` a round, with some at random far above the others."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((rounds, 3, 5)) * rate ** np.arange(rounds)[:, None, None]
    return torch.from_numpy(g * rng.lognormal(0, 1.5, (rounds, 1, 1)))


def certified(learner, gradients):
    actions_of(learner, gradients)
    return learner.certificate()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("on_excess", ["clip", "grow"])
@pytest.mark.parametrize("name", ["ftrl", "faml"])
def test_unknown_bounds_are_certified_after_the_fact(name, on_excess, seed):
    learner = LEARNERS[name]((3, 5), gradient_bound=None, on_excess=on_excess, dtype=F64)
    gradients = growing(seed=seed, rate=1.3)
    gradients[:2] = 0  # the game begins with the first gradient that is not zero
    certificate = certified(learner, gradients)
    assert certificate.holds
    norms = np.linalg.norm(gradients.numpy(), ord=2, axis=(1, 2))
    assert learner.level.item() == pytest.approx(norms.max(), rel=1e-12)
    first = nuclear(gradients[2].numpy())
    assert learner.first_nuclear.item() == pytest.approx(first, rel=1e-12)
    # Each ‖E_t‖_* is at most 3 times what the bound grows by (Remark B.1).
    assert learner.excess <= 3 * (norms.max() - norms[2]) * (1 + 1e-12)


def test_the_bound_grows_by_default_where_none_is_stated():
    learner = FAML((3, 5), gradient_bound=None, dtype=F64)
    certificate = certified(learner, growing())
    assert learner.on_excess == "grow"
    assert certificate.gradient_bound == certificate.largest == learner.level
    ample = FAML((3, 5), gradient_bound=1e9, on_excess="grow", dtype=F64)
    assert certified(ample, growing()).excess == 0


def test_games_of_a_batch_have_their_own_bounds():
    bounds = torch.tensor([1.0, 100.0], dtype=F64)
    gradients = torch.stack([growing(10), growing(10, seed=1)], dim=1)
    learner = FAML((2, 3, 5), gradient_bound=bounds, on_excess="clip", dtype=F64)
    certificate = certified(learner, gradients)
    for i, bound in enumerate(bounds.tolist()):
        alone = FAML((3, 5), gradient_bound=bound, on_excess="clip", dtype=F64)
        single = certified(alone, gradients[:, i])
        torch.testing.assert_close(certificate.bound[i], single.bound)
        torch.testing.assert_close(certificate.regret[i], single.regret)


@pytest.mark.parametrize("rows", [3, 128])  # from 128 on the ledger bounds norms from above
def test_a_game_of_a_batch_begins_with_its_own_first_gradient(rows):
    gradients = torch.eye(rows, rows + 2, dtype=F64).expand(2, 2, -1, -1).clone()
    gradients[0, 1] = 0
    learner = FAML((2, rows, rows + 2), gradient_bound=None, on_excess="clip", dtype=F64)
    certificate = certified(learner, gradients)
    assert learner.excess.abs().max() <= 1e-9 * rows
    torch.testing.assert_close(learner.first_nuclear, torch.full((2,), float(rows), dtype=F64))
    assert certificate.holds and (learner.play()[1] != 0).any()


def test_an_understated_bound_is_paid_for():
    # On g_t = (−1000)^t FTRL plays x = −s/(√2·√Σg²) → ∓1/√2 before each jump, loses |g_T|/√2 on it
    # and |s_T| → |g_T| in hindsight: 1 + 1/√2 against √2, if the excess were not in the bound.
    gradients = (-1000.0) ** torch.arange(12, dtype=F64)[:, None, None]
    learner = FTRL((1, 1), gradient_bound=1e-6, validate=False, dtype=F64)
    certificate = certified(learner, gradients)
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


# ---- any potential -----------------------------------------------------------------------------


class Plain(potentials.Potential):
    """The hyperbolic potential as a plain class with three methods."""

    def __init__(self, note="mine"):
        self.note, self.weights = note, (1, 2)

    def value(self, s, smoothing):
        return potentials.Hyperbolic().value(s, smoothing)

    def gradient(self, s, smoothing):
        return potentials.Hyperbolic().gradient(s, smoothing)

    def admissibility(self, m, n):
        return potentials.Admissibility(1.0, 1.0)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 4)], ids=str)
def test_a_potential_of_ones_own_is_played(shape):
    gradients = torch.stack([streams.gaussian(shape, dtype=F64).gradient(t) for t in range(1, 12)])
    own, faml = GBPA(shape, Plain(), dtype=F64), FAML(shape, dtype=F64)
    # Up to the rounding of one eigendecomposition where FAML takes another.
    assert torch.dist(actions_of(own, gradients), actions_of(faml, gradients)) <= 1e-10
    certificate = own.certificate()
    torch.testing.assert_close(certificate.bound, faml.bound())
    assert certificate.holds
    assert {"potential": "Plain", "note": "mine", "weights": "(1, 2)"}.items() <= (
        own.options().items()
    )
    state = own.state_dict()
    GBPA(shape, Plain(), dtype=F64).load_state_dict(state)
    for other in (Plain("another"), potentials.Hyperbolic()):
        with pytest.raises(ValueError, match="the state has"):
            GBPA(shape, other, dtype=F64).load_state_dict(state)


class Stepped(potentials.Potential):
    """The hyperbolic potential of one entry at 3L for L < √250 and at L above: α = 3, β = 1.

    It has values above |s|, a Hessian of at most 1/L, and rises with L by at most 3 per unit.
    """

    def value(self, s, smoothing):
        return potentials.Hyperbolic().value(s, smoothing * (1 + 8 * (smoothing < 250)))

    def gradient(self, s, smoothing):
        return potentials.Hyperbolic().gradient(s, smoothing * (1 + 8 * (smoothing < 250)))

    def admissibility(self, m, n):
        return potentials.Admissibility(3.0, 1.0)


def test_a_discounted_game_needs_a_homogeneous_potential():
    """Gradients that move Λ across the step climb where |x| is small and descend where it is large.

    Admissibility does not forbid it: in the plain game L never falls.
    """
    assert search_admissibility(Stepped(), 1, 1, starts=4, steps=10).holds
    discount, learner = 0.9995, GBPA((1, 1), Stepped(), discount=0.9995, dtype=F64)
    for t in range(2500):
        smoothing = learner.smoothing().item()
        # With η² = 3 this square would bring Λ from the discounted Gram to the step.
        square = 3 * (250 - smoothing) + (1 - discount**2) * learner.gram.item()
        size = min(1.0, max(0.0, square + (0.015 if smoothing < 250 else -0.015))) ** 0.5
        start = 1.0 if t < 25 else (-1.0) ** t
        size = start if square > 1 else size if smoothing < 250 else -size
        learner.play()
        learner.observe(torch.tensor([[size]], dtype=F64))
    certificate = learner.certificate()
    assert certificate.regret > 1.5 * certificate.bound and not certificate.holds
    assert "provided that Stepped is homogeneous" in certificate.theorem
    for other in (GBPA((1, 1), Stepped()), FAML((1, 1), discount=0.9)):
        assert "provided" not in other.certificate().theorem


def test_a_random_potential_is_drawn_anew_every_round():
    gradients = torch.zeros(4, 3, 5, dtype=F64)
    gradients[:, 0, 0] = 0.1
    learner = GBPA((3, 5), potentials.Gaussian(samples=1), dtype=F64)
    actions = actions_of(learner, gradients)
    assert all(torch.dist(a, b) > 0.1 for a, b in pairwise(actions[1:]))
    assert "may depend" in learner.refusal(oblivious=False)
    assert learner.certificate(delta=0.1).bound > learner.bound()
    again = GBPA((3, 5), potentials.Gaussian(samples=1), dtype=F64)
    assert torch.equal(actions_of(again, gradients), actions)
