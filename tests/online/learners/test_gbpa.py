"""The games that the four learners play, against closed forms and NumPy's SVD."""

import math
from itertools import pairwise

import cvxpy as cp
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    CERTIFIED,
    LEARNERS,
    OBLIVIOUS,
    SHAPES,
    STREAMS,
    ledger_of,
    operator,
    polar,
    root,
    rounds_of,
)
from nucleon import noise
from nucleon.online import potentials, streams, theory
from nucleon.online.admissibility import search_admissibility
from nucleon.online.learners import FAML, FTL, FTPL, FTRL, GBPA
from nucleon.online.regret import Ledger

F64 = torch.float64
# What the design promises of an action's norm, by dtype, for the reference methods.
PROMISE = {torch.float64: 1e-9, torch.float32: 1e-5}


def rank_one_gradients(rounds, shape, seed=0, scale=1.0):
    """Gaussian gradients with a drift, of operator norm at most `scale`."""
    g = np.random.default_rng(seed).standard_normal((rounds, *shape)) + 0.3
    g *= scale / np.linalg.svd(g, compute_uv=False).max()
    return torch.from_numpy(g)


def actions_of(learner, gradients):
    """X_1 … X_{T+1} against given gradients."""
    actions = [learner.play()]
    for gradient in gradients:
        learner.observe(gradient)
        actions.append(learner.play())
    return torch.stack(actions)


# ---- the cross product -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", LEARNERS)
def test_actions_stay_in_the_ball_and_regret_under_its_bound(name, stream, shape):
    rounds, radius, bound = 24, 2.5, 1.5
    learner = LEARNERS[name](shape, radius=radius, gradient_bound=bound, dtype=F64)
    source = STREAMS[stream](shape, bound=bound, dtype=F64)
    ledger = Ledger(shape, radius=radius)
    for t, (gradient, action) in enumerate(rounds_of(learner, source, rounds), start=1):
        assert action.shape == shape and action.dtype == F64
        assert operator(action) <= radius * (1 + PROMISE[F64])
        assert t > 1 or not action.any()
        ledger.record(gradient, action)
    certificate = learner.certificate()
    assert certificate.bound.shape == certificate.regret.shape == torch.Size(shape[:-2])
    assert (certificate.refusal is None) == (
        name in ("ftrl", "faml") or (name == "ftpl" and source.oblivious)
    )
    if name in ("ftrl", "faml"):
        assert certificate.holds
    if name == "ftl":
        assert certificate.bound.isinf().all() and not certificate.holds


@pytest.mark.parametrize("stream", ["ill-conditioned", "low-rank", "drifting", "greedy"])
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("shape", [(4, 9), (6, 2)], ids=str)
def test_float32_games_keep_the_promise_and_the_bound(name, stream, shape):
    learner = LEARNERS[name](shape, dtype=torch.float32, discount=0.97)
    source = STREAMS[stream](shape, dtype=torch.float32)
    ledger = Ledger(shape, discount=0.97)
    for gradient, action in rounds_of(learner, source, 60):
        assert action.dtype == torch.float32
        assert operator(action) <= 1 + PROMISE[torch.float32]
        ledger.record(gradient, action)
    if name in ("ftrl", "faml"):
        assert learner.certificate().holds


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


@pytest.mark.parametrize("shape", [(4, 6), (5, 2)], ids=str)
@pytest.mark.parametrize("stream", OBLIVIOUS)
def test_ftpl_mean_regret_over_seeds_is_under_its_bound(stream, shape):
    # 40 games with their own noise on one stream of gradients; the 99.9 % upper limit of the mean.
    games, rounds = 40, 40
    source = STREAMS[stream](shape, dtype=F64)
    learner = FTPL((games, *shape), samples=1, dtype=F64)
    ledger = Ledger((games, *shape))
    for t in range(1, rounds + 1):
        gradient = source.gradient(t).expand(games, *shape).contiguous()
        ledger.record(gradient, learner.play())
        learner.observe(gradient, oblivious=True)
    certificate = learner.certificate()
    regret, bound = certificate.regret.numpy(), certificate.bound.numpy()
    assert np.ptp(bound) <= 1e-12 * bound.max()
    if stream != "alternating":  # its draws differ little: all singular values of E are equal
        assert np.ptp(regret) > 0
    error = scipy.stats.t.ppf(0.999, games - 1) * regret.std(ddof=1) / math.sqrt(games)
    assert regret.mean() + error <= bound[0]
    assert "in the mean" in certificate.theorem


# ---- closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("eta", [None, 0.4])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 3), (3, 7)], ids=str)
def test_faml_is_the_leading_block_of_the_polar_factor_of_s_and_l(shape, eta, discount):
    gradients = rank_one_gradients(12, shape)
    learner = FAML(shape, radius=3.0, gradient_bound=1.2, eta=eta, discount=discount, dtype=F64)
    actions = actions_of(learner, gradients).numpy()
    total, gram = np.zeros(shape), np.zeros((shape[0], shape[0]))
    for gradient, action in zip(gradients.numpy(), actions[1:], strict=True):
        total = discount * total + gradient
        gram = discount**2 * gram + gradient @ gradient.T
        level = root(gram + (1.2 / discount) ** 2 * np.eye(shape[0])) / (
            1.0 if eta is None else eta
        )
        block = polar(np.hstack([total, level]))[:, : shape[1]]
        # Both are float64 factorizations of a matrix with condition number under 1e2.
        np.testing.assert_allclose(action, -3.0 * block, atol=1e-12)


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
    assert operator(action) <= 1 + PROMISE[F64]
    assert not action[1].any()  # the other game has seen nothing but zeros
    augmented = np.hstack([learner.total[0].numpy(), root(learner.smoothing()[0].numpy())])
    error = np.linalg.norm(action[0].numpy() + polar(augmented)[:, :6], 2)
    # One eigendecomposition errs by 4 eps·κ at most, within the promise. Above, Λ itself is only
    # known to eps·‖Λ‖, to action and oracle alike, which moves its smallest directions by eps·κ.
    condition = np.linalg.cond(augmented) ** 2
    assert error <= max(PROMISE[F64], 64 * 2.2e-16 * condition)


def test_faml_plays_totals_whose_square_overflows():
    learner = FAML((3, 5), gradient_bound=1e150, dtype=F64)
    learner.play()
    learner.observe(1e150 * torch.eye(3, 5, dtype=F64))
    learner.total, learner.ledger.rounds = 1e10 * learner.total, 10**10
    torch.testing.assert_close(learner.play(), -torch.eye(3, 5, dtype=F64))


def test_faml_on_one_row_is_the_normalized_vector():
    gradients = rank_one_gradients(20, (1, 6)).numpy()
    actions = actions_of(FAML((1, 6), radius=2.0, dtype=F64), torch.from_numpy(gradients)).numpy()
    sums = np.cumsum(gradients, axis=0)
    squares = 1 + np.cumsum((gradients**2).sum((1, 2)))
    expected = -2 * sums / np.sqrt((sums**2).sum((1, 2)) + squares)[:, None, None]
    np.testing.assert_allclose(actions[1:], expected, rtol=1e-12)


def test_faml_on_diagonal_matrices_is_coordinatewise_on_the_box():
    entries = np.random.default_rng(1).uniform(-1, 1, (20, 4))
    gradients = np.zeros((20, 4, 6))
    gradients[:, range(4), range(4)] = entries
    actions = actions_of(FAML((4, 6), radius=0.5, dtype=F64), torch.from_numpy(gradients)).numpy()
    sums, squares = np.cumsum(entries, 0), 1 + np.cumsum(entries**2, 0)
    expected = np.zeros((20, 4, 6))
    expected[:, range(4), range(4)] = -0.5 * sums / np.sqrt(sums**2 + squares)
    np.testing.assert_allclose(actions[1:], expected, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)], ids=str)
def test_ftl_plays_the_polar_factor(shape):
    gradients = rank_one_gradients(8, shape)
    actions = actions_of(FTL(shape, radius=2.0, dtype=F64), gradients).numpy()
    for total, action in zip(np.cumsum(gradients.numpy(), 0), actions[1:], strict=True):
        np.testing.assert_allclose(action, -2 * polar(total), atol=1e-12)


def test_ftrl_solves_its_problem():
    gradients = rank_one_gradients(5, (3, 4))
    learner = FTRL((3, 4), radius=2.0, dtype=F64)
    action = actions_of(learner, gradients)[-1].numpy()
    g = gradients.numpy()
    total, gram = g.sum(0), np.einsum("tij,tkj->ik", g, g)
    level = root(gram + np.eye(3)) / math.sqrt(0.5)
    x = cp.Variable((3, 4))
    cost = cp.sum(cp.multiply(total, x)) + 0.5 * cp.sum_squares(root(level) @ x)
    cp.Problem(cp.Minimize(cost), [cp.sigma_max(x) <= 1]).solve(solver="CLARABEL")
    # λ_min(level) ≥ 1/√½, so both gaps, 1e-8 of a value near 3, allow 3e-4 between the arguments.
    np.testing.assert_allclose(action, 2 * x.value, atol=6e-4)


@pytest.mark.parametrize("redraw", [True, False])
def test_ftpl_plays_the_mean_of_perturbed_leaders(redraw):
    m, n, width, samples = 3, 4, 9, 6
    gradients = rank_one_gradients(4, (m, n))
    learner = FTPL((m, n), samples=samples, seed=7, stream=5, width=width, redraw=redraw, dtype=F64)
    actions = actions_of(learner, gradients).numpy()
    alpha, beta = math.sqrt(m) + math.sqrt(width), 1 / math.sqrt(width - m - 1)
    for t, action in enumerate(actions[1:], start=1):
        g = gradients[:t].numpy()
        level = np.linalg.cholesky((np.eye(m) + np.einsum("tij,tkj->ik", g, g)) * beta / alpha)
        padded = np.hstack([g.sum(0), np.zeros((m, width - n))])
        draw = {"seed": 7, "stream": 5, "step": t if redraw else 0, "dtype": F64}
        z = [noise.normal((m, width), sample=k, **draw).numpy() for k in range(samples)]
        mean = np.mean([polar(padded + level @ sample)[:, :n] for sample in z], axis=0)
        np.testing.assert_allclose(action, -mean, atol=1e-11)


def test_padded_ftpl_tends_to_faml():
    # Per draw ZZᵀ/n′ → I with an error of order √(m/n′), and so do the constants.
    gradients = rank_one_gradients(10, (3, 5))
    target = actions_of(FAML((3, 5), dtype=F64), gradients)
    errors = [
        torch.dist(actions_of(FTPL((3, 5), width=width, dtype=F64), gradients), target).item()
        for width in (6, 96, 1536)
    ]
    assert errors[1] <= 0.5 * errors[0] and errors[2] <= 0.5 * errors[1]
    assert errors[2] <= 2 * math.sqrt(3 / 1536) * math.sqrt(10)


# ---- reductions and symmetries -----------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_discounted_game_is_the_plain_one_on_growing_gradients(name):
    discount, bound = 0.8, 1.1
    gradients = rank_one_gradients(25, (3, 5))
    learner = LEARNERS[name]((3, 5), gradient_bound=bound, discount=discount, dtype=F64)
    actions = actions_of(learner, gradients)
    total, gram = torch.zeros(3, 5, dtype=F64), torch.zeros(3, 3, dtype=F64)
    for t, (gradient, action) in enumerate(zip(gradients, actions[1:], strict=True), start=1):
        grown = gradient / discount**t
        total, gram = total + grown, gram + grown @ grown.mT
        level = (bound / discount ** (t + 1)) ** 2
        smoothing = (level * torch.eye(3, dtype=F64) + gram) / learner.eta**2
        noise_of_round = {"step": t} if name == "ftpl" else {}
        plain = -learner.potential.gradient(total, smoothing, **noise_of_round)
        # FTRL: two solutions within relative gap 1e-8 (value ≤ 5, λ_min(L) ≥ 1), else rounding.
        assert torch.dist(action, plain) <= (1e-3 if name == "ftrl" else 1e-10)


def test_a_long_discounted_game_does_not_overflow():
    learner = FAML((2, 3), discount=0.5, dtype=F64)
    ledger_of(learner, streams.gaussian((2, 3), dtype=F64), 1200)  # 2^1200 overflows
    certificate = learner.certificate()
    assert certificate.holds and certificate.bound.isfinite() and certificate.regret > 0


@pytest.mark.parametrize("name", LEARNERS)
def test_tall_games_are_transposed_wide_games(name):
    gradients = rank_one_gradients(8, (3, 6))
    wide = LEARNERS[name]((3, 6), dtype=F64)
    tall = LEARNERS[name]((6, 3), dtype=F64)
    assert torch.equal(actions_of(tall, gradients.mT.contiguous()), actions_of(wide, gradients).mT)
    assert torch.equal(tall.bound(), wide.bound())


@pytest.mark.parametrize("name", LEARNERS)
def test_a_batch_is_its_games_one_by_one(name):
    games, bounds = 3, torch.tensor([1.0, 2.0, 5.0], dtype=F64)
    gradients = torch.stack(
        [bound * rank_one_gradients(8, (3, 4), seed) for seed, bound in enumerate(bounds)], dim=1
    )
    together = LEARNERS[name]((games, 3, 4), gradient_bound=bounds, dtype=F64)
    actions = actions_of(together, gradients)
    for game in range(games):
        identity = {"stream": game} if name == "ftpl" else {}
        alone = LEARNERS[name]((3, 4), gradient_bound=bounds[game].item(), dtype=F64, **identity)
        # Batched and single products may round differently; FTRL may stop at another iterate.
        close = 1e-3 if name == "ftrl" else 1e-12
        assert torch.dist(actions[:, game], actions_of(alone, gradients[:, game])) <= close
        torch.testing.assert_close(together.bound()[game], alone.bound(), rtol=1e-7, atol=0)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["ftl", "ftpl", "faml"]),
    shape=st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 5), (3, 3)]),
    scale=st.sampled_from([1e-120, 1e-8, 3.0, 1e60]),
    radius=st.sampled_from([1e-3, 1.0, 1e5]),
    seed=st.integers(0, 1000),
)
def test_actions_do_not_depend_on_the_scale_of_the_gradients(name, shape, scale, radius, seed):
    gradients = rank_one_gradients(6, shape, seed)
    unit = actions_of(LEARNERS[name](shape, dtype=F64), gradients)
    options = {"gradient_bound": scale, "radius": radius, "dtype": F64}
    scaled = actions_of(LEARNERS[name](shape, **options), scale * gradients)
    # Products by `scale` round once an entry; polar factors amplify that by 1/σ_min.
    smallest = np.linalg.svd(gradients.cumsum(0).numpy(), compute_uv=False).min()
    assert torch.dist(scaled / radius, unit) <= 1e-13 * (100 + 100 / smallest)


def test_unset_dtype_and_device_are_torchs():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert FAML((2, 3)).play().dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert FAML((2, 3)).play().dtype == before


# ---- what the paper says of the four -----------------------------------------------------------


def relative_regret(learner, stream, rounds=400):
    ledger = ledger_of(learner, stream, rounds)
    values = np.linalg.eigvalsh(learner.gram.numpy())
    return ledger.regret().item() / np.sqrt(np.maximum(values, 0)).sum()


def alternating_scalar_regret(action, rounds=400):
    """Regret of x = action(s, √(1 + Σg²)) on ½, −1, 1, …; E has equal singular values."""
    s, square, loss = 0.5, 0.25, 0.0
    for t in range(2, rounds + 1):
        g = -1.0 if t % 2 == 0 else 1.0
        loss += g * action(s, math.sqrt(1 + square))
        s, square = s + g, square + 1
    return loss + abs(s)


def test_alternating_gradients_make_ftl_linear_and_no_other():
    # Regret over D·Tr√M at 8×16 after 400 rounds; each singular value plays the scalar game.
    stream = streams.alternating((8, 16), dtype=F64)
    measured = {
        name: relative_regret(LEARNERS[name]((8, 16), dtype=F64), stream) for name in LEARNERS
    }
    scalar = {
        "ftl": lambda s, level: -math.copysign(1, s),
        "ftrl": lambda s, level: max(-1.0, min(1.0, -s * math.sqrt(0.5) / level)),
        "faml": lambda s, level: -s / math.hypot(s, level),
    }
    for name, action in scalar.items():
        expected = alternating_scalar_regret(action) / math.sqrt(399.25)
        # FTRL's relative gap of 1e-8 moves its action by at most √(2·1e-8).
        assert measured[name] == pytest.approx(expected, rel=2e-4 if name == "ftrl" else 1e-9)
    assert measured["ftl"] == pytest.approx(20.0, abs=0.01)
    assert measured["ftrl"] == pytest.approx(0.70, abs=0.01)
    assert measured["faml"] == pytest.approx(0.98, abs=0.01)
    assert 0.9 <= measured["ftpl"] <= 1.2


@pytest.mark.parametrize("name", LEARNERS)
def test_on_gaussian_gradients_all_are_alike(name):
    learner = LEARNERS[name]((8, 16), dtype=F64)
    assert 0.85 <= relative_regret(learner, streams.gaussian((8, 16), dtype=F64)) <= 1.0


def test_ftpl_with_few_samples_is_linear_against_the_adversary_that_sees_them():
    stream = streams.adversary((4, 8), dtype=F64)
    regrets = {}
    for rounds in (100, 400):
        learner = FTPL((4, 8), samples=1, dtype=F64)
        ledger_of(learner, stream, rounds)
        certificate = learner.certificate()
        assert not certificate.holds and "may depend" in (certificate.refusal or "")
        regrets[rounds] = certificate.regret.item()
    # Linear growth multiplies by 4, the √T of the theorem by 2.
    assert regrets[400] >= 3.5 * regrets[100]
    assert regrets[400] > certificate.bound.item()
    many = FTPL((4, 8), samples=64, dtype=F64)
    assert ledger_of(many, stream, 100).regret() < 0.5 * regrets[100]
    for name in ("ftrl", "faml"):
        learner = LEARNERS[name]((4, 8), dtype=F64)
        ledger_of(learner, stream, 100)
        assert learner.certificate().holds


@pytest.mark.parametrize("eta", [0.2, 5.0])
@pytest.mark.parametrize("name", CERTIFIED)
def test_another_eta_moves_the_bound_as_the_theorem_says(name, eta):
    learner = LEARNERS[name]((3, 6), eta=eta, dtype=F64)
    gradients = rank_one_gradients(30, (3, 6))
    ledger = Ledger((3, 6))
    for gradient in gradients:
        ledger.record(gradient, learner.play())
        learner.observe(gradient, oblivious=True)
    alpha, beta = (0.5, 1.0) if name == "ftrl" else (1.0, 1.0)
    if name == "ftpl":
        alpha, beta = theory.ftpl_constants(3, 6)
    g = gradients.numpy()
    level = root(np.einsum("tij,tkj->ik", g, g) + np.eye(3)).trace()
    first = np.linalg.svd(g[0], compute_uv=False).sum()
    expected = (beta * eta + alpha / eta) * level + (1 - beta * eta) * first
    # FTRL adds its gaps, at most 1e-8 of values that sum to less than 1e3.
    assert learner.bound().item() == pytest.approx(expected, rel=1e-6 if name == "ftrl" else 1e-12)
    certificate = learner.certificate()
    assert certificate.holds


def test_ftrl_carries_the_gaps_of_a_lazy_solver():
    gradients = rank_one_gradients(30, (3, 6))
    lazy = FTRL((3, 6), tolerance=0.3, max_iterations=1, discount=0.9, dtype=F64)
    exact = FTRL((3, 6), discount=0.9, dtype=F64)
    gaps, ledger = 0.0, Ledger((3, 6), discount=0.9)
    for gradient in gradients:
        x = lazy.play()
        exact.play()
        if lazy.rounds:
            level = root((lazy.smoothing()).numpy())
            slope = lazy.total.numpy() + level @ x.numpy()  # −x maximizes ⟨S, ·⟩ − ½Tr·ᵀL·
            gap = np.linalg.svd(slope, compute_uv=False).sum() + (slope * x.numpy()).sum()
            gaps = gaps + gap
        gaps *= 0.9
        ledger.record(gradient, x)
        lazy.observe(gradient)
        exact.observe(gradient)
    assert gaps > 1e-3
    assert (lazy.bound() - exact.bound()).item() == pytest.approx(gaps, rel=1e-4)
    assert lazy.certificate().holds
    assert isinstance(lazy.potential, potentials.Regularized)


def test_ftrl_takes_the_frank_wolfe_gap_for_its_bound():
    # The projected unconstrained minimizer is within 2e-5 of the optimum, as the distance to the
    # minimum over all X proves, but its Frank–Wolfe gap is a hundred times that.
    learner = FTRL((2, 2), tolerance=1e-3, dtype=F64)
    learner.total = torch.tensor([[-1.0, 1.0], [-6.0, -8.0]], dtype=F64)
    learner.gram, learner.ledger.rounds = torch.diag(torch.tensor([0.0, 99.0], dtype=F64)), 1
    x = learner.play()
    slope = learner.total.numpy() + root(learner.smoothing().numpy()) @ x.numpy()
    frank_wolfe = np.linalg.svd(slope, compute_uv=False).sum() + (slope * x.numpy()).sum()
    free = np.sum(slope * np.linalg.solve(root(learner.smoothing().numpy()), slope)) / 2
    assert frank_wolfe > 50 * free
    assert learner.gap.item() == pytest.approx(frank_wolfe, rel=1e-9)
    learner.observe(torch.zeros(2, 2, dtype=F64))
    assert learner.gaps.item() == pytest.approx(frank_wolfe, rel=1e-9)


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
    assert "may depend" in learner.certificate().refusal
    assert learner.certificate(delta=0.1).bound > learner.bound()
    again = GBPA((3, 5), potentials.Gaussian(samples=1), dtype=F64)
    assert torch.equal(actions_of(again, gradients), actions)


@pytest.mark.parametrize("bad", [potentials.Hyperbolic, None, "hyperbolic"])
def test_what_is_no_potential_is_refused(bad):
    with pytest.raises(TypeError, match=r"potential must be an instance.*Hyperbolic\(\)"):
        GBPA((2, 3), bad)
