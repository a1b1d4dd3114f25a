"""Shampoo, Kronecker FTRL and scalar GBPA against cvxpy, NumPy twins on vec X and closed forms."""

import math

import cvxpy as cp
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import SHAPES, STREAMS, ledger_of, nuclear, operator, polar, rounds_of
from nucleon import noise
from nucleon.online import streams
from nucleon.online.learners.adagrad import AdaGradOGD
from nucleon.online.learners.scalar_gbpa import ScalarGBPA
from nucleon.online.learners.shampoo import KroneckerFTRL, OneSidedShampoo, Shampoo
from nucleon.online.regret import Ledger

F64 = torch.float64
POWERS = {OneSidedShampoo: (0.5, 0.0), Shampoo: (0.25, 0.25), KroneckerFTRL: (0.25, 0.25)}
PROJECTED = list(POWERS)
DESCENT = [OneSidedShampoo, Shampoo]
ALL = [*PROJECTED, ScalarGBPA]


def build(kind, shape, *, bound=1.0, **options):
    """A learner told the gradient bound in the norm that it wants, if any."""
    if kind is KroneckerFTRL:
        options["gradient_bound"] = bound
    if kind is ScalarGBPA:
        options["gradient_bound"] = bound * math.sqrt(min(shape[-2:]))
    return kind(shape, dtype=options.pop("dtype", F64), **options)


def gradients_of(rounds, shape, seed=0, scale=1.0):
    """Gradients with a drift, so that the constraint binds, of operator norm at most `scale`."""
    g = np.random.default_rng(seed).standard_normal((rounds, *shape)) + 0.5
    return torch.from_numpy(g * (scale / np.linalg.svd(g, compute_uv=False).max()))


def power(a, p, epsilon=0.0):
    """(εI + a)^p by NumPy, zero (and for p < 0 the pseudo-inverse) on the kernel."""
    values, vectors = np.linalg.eigh(a)
    values = np.where(values > 1e-13 * max(values[-1], 1e-300), values, 0.0) + epsilon
    with np.errstate(divide="ignore"):
        powers = np.where(values > 0, values**p, 0.0)
    return (vectors * powers) @ vectors.T


def roots(kind, gradients, epsilon=0.0):
    """L_t and R_t of the gradients so far."""
    left, right = POWERS[kind]
    rows = np.einsum("tij,tkj->ik", gradients, gradients)
    columns = np.einsum("tij,tik->jk", gradients, gradients)
    identity = np.eye(columns.shape[0])
    return power(rows, left, epsilon), power(columns, right, epsilon) if right else identity


def vec(x):
    """Columns stacked."""
    return x.T.reshape(-1)


# ---- the cross product -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", ALL)
def test_actions_stay_in_the_ball_and_regret_under_its_bound(kind, stream, shape):
    radius, bound = 2.5, 1.5
    learner = build(kind, shape, bound=bound, radius=radius)
    source = STREAMS[stream](shape, bound=bound, dtype=F64)
    ledger = Ledger(shape, radius=radius)
    for t, (gradient, action) in enumerate(rounds_of(learner, source, 7), start=1):
        assert action.shape == shape and action.dtype == F64
        assert operator(action) <= radius * (1 + 1e-9)
        assert t > 1 or not action.any()
        ledger.record(gradient, action)
    certificate = learner.certificate()
    assert certificate.holds
    assert certificate.bound.shape == certificate.regret.shape == torch.Size(shape[:-2])


@pytest.mark.parametrize("stream", ["ill-conditioned", "greedy"])
@pytest.mark.parametrize("kind", ALL)
def test_float32_games_keep_the_promise_and_the_bound(kind, stream):
    learner = build(kind, (3, 6), dtype=torch.float32)
    ledger = Ledger((3, 6))
    for gradient, action in rounds_of(learner, STREAMS[stream]((3, 6), dtype=torch.float32), 12):
        assert action.dtype == torch.float32 and operator(action) <= 1 + 1e-5
        ledger.record(gradient, action)
    assert learner.certificate().holds


@pytest.mark.parametrize("kind", DESCENT)
def test_long_games_against_streams_that_hurt(kind):
    for stream in (streams.alternating((2, 3), dtype=F64), streams.adversary((2, 3), dtype=F64)):
        learner = kind((2, 3), dtype=F64)
        ledger_of(learner, stream, 100)
        certificate = learner.certificate()
        assert certificate.holds and certificate.regret > 0
        # The gaps must not be what makes the bound hold.
        assert learner.gaps <= 0.01 * certificate.bound


# ---- one step, solved by others ----------------------------------------------------------------


@pytest.mark.parametrize("kind", PROJECTED)
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_step_is_the_program_on_vec_x_with_the_kronecker_metric(kind, rounds):
    # cvxpy sees vec X and R ⊗ L only: neither the trace form nor the change of scale is shared.
    shape, radius, eta, bound = (2, 3), 0.7, 0.8, 1.0
    gradients = gradients_of(rounds, shape)
    options = {"radius": radius, "eta": eta, "tolerance": 1e-10}
    if kind is not KroneckerFTRL:
        options["epsilon"] = 0.01
    learner = build(kind, shape, bound=bound, **options)
    for gradient in gradients:
        before = learner.play().numpy()
        learner.observe(gradient)
    action = learner.play().numpy()
    g = gradients.numpy()
    left, right = roots(kind, g, bound**2 if kind is KroneckerFTRL else 0.01)
    metric = np.kron(right, left)
    linear, center = (g.sum(0), 0.0 * before) if kind is KroneckerFTRL else (g[-1], before)
    x = cp.Variable(shape)
    away = cp.vec(x - center, order="F")
    cost = vec(linear) @ cp.vec(x, order="F") + cp.quad_form(away, metric) / (2 * eta)
    cp.Problem(cp.Minimize(cost), [cp.sigma_max(x) <= radius]).solve(solver="CLARABEL")
    # λ_min(R ⊗ L)/η ≥ 0.01^½/0.8 and cvxpy's value is within 1e-8: ‖ΔX‖² ≤ 2·1e-8·8.
    np.testing.assert_allclose(action, x.value, atol=4e-4)
    if kind is not KroneckerFTRL or rounds > 1:
        assert np.linalg.norm(action, 2) >= radius * (1 - 1e-6)  # the constraint binds


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    rounds=st.integers(1, 5),
    epsilon=st.sampled_from([0.0, 0.1]),
    kind=st.sampled_from(DESCENT),
    seed=st.integers(0, 99),
)
def test_without_projection_it_is_descent_on_vec_x_in_the_kronecker_metric(
    shape, rounds, epsilon, kind, seed
):
    eta, g = 0.3, np.random.default_rng(seed).standard_normal((rounds, *shape))
    learner = kind(shape, eta=eta, epsilon=epsilon, projection="none", dtype=F64)
    flip = shape[0] > shape[1]
    x = np.zeros(shape[0] * shape[1])
    for t, gradient in enumerate(g, start=1):
        learner.play()
        learner.observe(torch.from_numpy(gradient))
        seen = np.swapaxes(g[:t], 1, 2) if flip else g[:t]
        metric = np.kron(*reversed(roots(kind, seen, epsilon)))
        x = x - eta * np.linalg.pinv(metric, rcond=1e-6, hermitian=True) @ vec(seen[-1])
    expected = x.reshape(seen.shape[2], seen.shape[1]).T
    # A nonzero eigenvalue of M is rarely under 1e-6 of the largest: its root loses six digits.
    np.testing.assert_allclose(
        learner.play().numpy(), expected.T if flip else expected, atol=1e-8 * (1 + np.abs(x).max())
    )


@settings(max_examples=30, deadline=None)
@given(m=st.integers(1, 4), n=st.integers(1, 4), seed=st.integers(0, 999))
def test_the_trace_form_is_the_kronecker_form(m, n, seed):
    rng = np.random.default_rng(seed)
    x, left, right = (rng.standard_normal(s) for s in ((m, n), (m, m), (n, n)))
    left, right = left @ left.T, right @ right.T
    trace = np.trace(x.T @ left @ x @ right)
    assert vec(x) @ np.kron(right, left) @ vec(x) == pytest.approx(trace, rel=1e-10)


@pytest.mark.parametrize("kind", DESCENT)
def test_rounding_is_no_direction_of_the_pseudo_inverse(kind):
    # G_t = s_t·uvᵀ: both preconditioners are √Σs² on uvᵀ, and x_{t+1} = x_t − η·s_t/√Σs²·uvᵀ. What
    # rounding leaves of the zero eigenvalues has a root of 1e-8, and would add as much a round.
    rng = np.random.default_rng(0)
    u, v = (a / np.linalg.norm(a) for a in (rng.standard_normal(n) for n in (6, 8)))
    signs, eta = rng.uniform(-1, 1, 40), 0.3
    learner = kind((6, 8), eta=eta, projection="none", dtype=F64)
    for s in signs:
        learner.play()
        learner.observe(torch.from_numpy(s * np.outer(u, v)))
    length = -eta * np.sum(signs / np.sqrt(np.cumsum(signs**2)))
    # Forty steps of length ≤ η, each to some ten rounding errors.
    np.testing.assert_allclose(learner.play().numpy(), length * np.outer(u, v), atol=1e-13)


@pytest.mark.parametrize("kind", DESCENT)
def test_inside_the_ball_the_projection_does_nothing(kind):
    options = {"radius": 100.0, "eta": 0.1, "epsilon": 0.05, "dtype": F64}
    free, bound = kind((3, 4), projection="none", **options), kind((3, 4), **options)
    for gradient in gradients_of(10, (3, 4)):
        np.testing.assert_allclose(bound.play().numpy(), free.play().numpy(), atol=1e-12)
        for learner in (free, bound):
            learner.observe(gradient)
    assert bound.gaps <= 1e-10  # rounding of L(X − X_t)R, weighed by the radius


# ---- closed forms ------------------------------------------------------------------------------


def test_one_row_is_scalar_adagrad_on_the_l2_ball():
    matrix = OneSidedShampoo((1, 5), radius=0.4, dtype=F64)
    vector = AdaGradOGD((1, 5), preconditioner="scalar", ball="l2", radius=0.4, dtype=F64)
    for gradient in gradients_of(30, (1, 5)):
        np.testing.assert_allclose(matrix.play().numpy(), vector.play().numpy(), atol=1e-10)
        for learner in (matrix, vector):
            learner.observe(gradient)
    assert matrix.bound().item() == pytest.approx(vector.bound().item(), rel=1e-9)


def test_diagonal_matrices_are_diagonal_adagrad_on_the_box():
    matrix = OneSidedShampoo((4, 4), radius=0.4, dtype=F64)
    vector = AdaGradOGD((1, 4), preconditioner="diagonal", ball="linf", radius=0.4, dtype=F64)
    for entries in np.random.default_rng(1).uniform(-0.6, 1, (25, 4)):
        action = matrix.play().numpy()
        np.testing.assert_allclose(np.diag(action), vector.play().numpy()[0], atol=1e-9)
        np.testing.assert_allclose(action, np.diag(np.diag(action)), atol=1e-9)
        matrix.observe(torch.from_numpy(np.diag(entries)))
        vector.observe(torch.from_numpy(entries[None]))
    assert matrix.bound().item() == pytest.approx(vector.bound().item(), rel=1e-9)


@pytest.mark.parametrize("kind", DESCENT)
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_the_game_does_not_depend_on_the_scale_of_the_gradients(kind, scale):
    plain, scaled = (kind((3, 4), dtype=F64, tolerance=1e-10) for _ in range(2))
    for gradient in gradients_of(8, (3, 4)):
        # A power of two changes no digit of the iterations, only the rounding of fourth roots.
        np.testing.assert_allclose(plain.play().numpy(), scaled.play().numpy(), atol=1e-9)
        plain.observe(gradient)
        scaled.observe(scale * gradient)


@pytest.mark.parametrize("kind", ALL)
def test_tall_games_are_transposed_wide_games(kind):
    wide, tall = build(kind, (2, 4)), build(kind, (4, 2))
    for gradient in gradients_of(8, (2, 4)):
        np.testing.assert_allclose(tall.play().numpy(), wide.play().mT.numpy(), atol=1e-10)
        wide.observe(gradient)
        tall.observe(gradient.mT.contiguous())
    assert tall.bound().item() == pytest.approx(wide.bound().item(), rel=1e-10)


@pytest.mark.parametrize("kind", ALL)
def test_a_batch_plays_its_games_apart(kind):
    gradients = gradients_of(6, (3, 2, 4))
    batch, singles = build(kind, (3, 2, 4)), [build(kind, (2, 4)) for _ in range(3)]
    for stack in gradients:
        for single, game in zip(singles, batch.play(), strict=True):
            # Two solutions to a relative gap of 1e-8: ‖ΔX‖² ≤ 4·1e-8/λ_min, λ_min ≥ 0.05.
            np.testing.assert_allclose(single.play().numpy(), game.numpy(), atol=1e-3)
        batch.observe(stack)
        for single, gradient in zip(singles, stack, strict=True):
            single.observe(gradient)


@pytest.mark.parametrize("kind", ALL)
def test_zero_gradients_move_nothing_and_cost_nothing(kind):
    learner = build(kind, (2, 3))
    for _ in range(3):
        assert not learner.play().any()
        learner.observe(torch.zeros(2, 3, dtype=F64))
    if kind in DESCENT:
        assert learner.bound() == 0
    learner.play()
    learner.observe(gradients_of(1, (2, 3))[0])
    assert learner.play().any() and learner.play().isfinite().all()


# ---- the bounds --------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [None, 0.6])
@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_the_bounds_by_hand(eta, epsilon):
    gradients, radius = gradients_of(7, (2, 3)), 1.5
    g = gradients.numpy()
    rows = np.linalg.eigvalsh(np.einsum("tij,tkj->ik", g, g)) + epsilon
    columns = np.maximum(np.linalg.eigvalsh(np.einsum("tij,tik->jk", g, g)), 0) + epsilon
    step, floor = math.sqrt(2) * radius if eta is None else eta, math.sqrt(epsilon)
    one = 2 * radius**2 / step * np.sqrt(rows).sum() + step * (np.sqrt(rows).sum() - 2 * floor)
    left, right = rows**0.25, columns**0.25
    two = 2 * radius**2 / step * (left.max() * right.sum() + left.sum() * right.max())
    two += step * math.sqrt(((left**2).sum() - 2 * floor) * ((right**2).sum() - 3 * floor))
    for kind, expected in ((OneSidedShampoo, one), (Shampoo, two)):
        learner = kind((2, 3), radius=radius, eta=eta, epsilon=epsilon, dtype=F64)
        for gradient in gradients:
            learner.play()
            learner.observe(gradient)
        # Columns of rank 2 leave an eigenvalue of 1e-16, whose fourth root is 1e-4.
        assert learner.bound().item() - learner.gaps.item() == pytest.approx(expected, rel=1e-3)
    if eta is None and epsilon == 0:
        assert one == pytest.approx(2 * math.sqrt(2) * radius * np.sqrt(rows).sum())


def test_the_kronecker_penalty_is_the_largest_over_the_ball():
    # Σλ_i(L)λ_i(R) is attained by aligned singular vectors, and by no random X exceeded.
    rng, g = np.random.default_rng(3), gradients_of(6, (2, 3)).numpy()
    learner = build(KroneckerFTRL, (2, 3), radius=1.3, eta=0.9)
    for gradient in g:
        learner.play()
        learner.observe(torch.from_numpy(gradient))
    left, right = roots(KroneckerFTRL, g, 1.0)
    root_traces = [
        np.sqrt(np.maximum(np.linalg.eigvalsh(a), 0)).sum()
        for a in (np.einsum("tij,tkj->ik", g, g), np.einsum("tij,tik->jk", g, g))
    ]
    rest = 0.9 * math.sqrt(root_traces[0] * root_traces[1]) + learner.gaps.item()
    penalty = learner.bound().item() - rest
    (_, u), (_, v) = np.linalg.eigh(left), np.linalg.eigh(right)
    best = 1.3 * u[:, ::-1] @ v[:, ::-1][:, :2].T

    def cost(x):
        return np.trace(x.T @ left @ x @ right) / (2 * 0.9)

    assert cost(best) == pytest.approx(penalty, rel=1e-6)
    assert all(
        cost(1.3 * polar(rng.standard_normal((2, 3)))) <= penalty * (1 + 1e-9) for _ in range(300)
    )


@pytest.mark.parametrize("kind", PROJECTED)
def test_the_gaps_of_a_poor_solver_are_in_the_bound(kind):
    gradients = gradients_of(12, (3, 4))
    options = {"solver": "frank-wolfe", "max_iterations": 1, "radius": 0.5}
    learner, eta = build(kind, (3, 4), **options), 0.5 * kind.default_eta
    ledger, gaps, total, g = Ledger((3, 4), radius=0.5), 0.0, 0.0, gradients.numpy()
    for t, gradient in enumerate(gradients, start=1):
        before = learner.play()
        learner.observe(gradient)
        ledger.record(gradient, before)
        x, total = learner.play().numpy(), total + gradient.numpy()
        if kind is KroneckerFTRL:
            left, right = roots(kind, g[:t], 1.0)
            slope = total + left @ x @ right / eta
        else:
            left, right = roots(kind, g[:t])
            slope = gradient.numpy() + left @ (x - before.numpy()) @ right / eta
        gaps += np.sum(slope * x) + 0.5 * nuclear(slope)
    assert learner.gaps.item() == pytest.approx(gaps, rel=1e-6) and gaps > 1e-3
    exact = build(kind, (3, 4), radius=0.5)
    for gradient in gradients:
        exact.play()
        exact.observe(gradient)
    assert learner.bound() - learner.gaps == pytest.approx((exact.bound() - exact.gaps).item())
    assert learner.certificate().holds


def test_the_gap_is_the_frank_wolfe_gap_of_the_proof():
    # With L/η = diag(2, 200)^½ the projected unconstrained minimizer is within 2e-5 of the optimum,
    # as the distance to the minimum over all X proves; its Frank–Wolfe gap is a hundred times that.
    eta, gradient = 1.5, np.array([[-1.0, 1.0], [-6.0, -8.0]])
    learner = OneSidedShampoo((2, 2), eta=eta, tolerance=1e-3, dtype=F64)
    weight = np.diag(np.sqrt([2.0, 200.0]))
    learner.gram = torch.from_numpy((eta * weight) ** 2 - gradient @ gradient.T)
    learner.play()
    learner.observe(torch.from_numpy(gradient))
    x = learner.play().numpy()
    slope = gradient + weight @ x
    frank_wolfe = np.sum(slope * x) + nuclear(slope)
    assert frank_wolfe > 50 * np.sum(slope * np.linalg.solve(weight, slope)) / 2
    assert learner.gaps.item() == pytest.approx(frank_wolfe, rel=1e-9)


# ---- without the projection --------------------------------------------------------------------


@pytest.mark.parametrize("kind", DESCENT)
def test_without_the_projection_it_leaves_the_ball_and_its_bound(kind):
    # E for half of the rounds, then −E: the unconstrained iterate is 2√T away and must come back,
    # a regret of order T^{3/2}, where the projected one turns around at the border.
    rounds, direction = 60, torch.eye(2, 3, dtype=F64)
    signs = [1.0] * (rounds // 2) + [-1.0] * (rounds // 2)
    stream = streams.replay(torch.stack([s * direction for s in signs]))
    free, projected = kind((2, 3), projection="none", dtype=F64), kind((2, 3), dtype=F64)
    ledger_of(free, stream, rounds // 2)
    assert operator(free.play()) > 5
    ledger_of(free, stream, rounds // 2)
    refused = free.certificate()
    assert not refused.holds and refused.bound.isinf() and "projection" in str(refused.refusal)
    ledger_of(projected, stream, rounds)
    kept = projected.certificate()
    assert kept.holds and refused.regret > 1.2 * kept.bound > 0


# ---- scalar GBPA -------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [None, 0.7])
def test_scalar_gbpa_by_numpy(eta):
    gradients = gradients_of(9, (2, 4))
    learner = ScalarGBPA((2, 4), radius=1.5, gradient_bound=2.0, eta=eta, dtype=F64)
    step = math.sqrt(2) if eta is None else eta
    for t, gradient in enumerate(gradients, start=1):
        learner.play()
        learner.observe(gradient)
        g = gradients[:t].numpy()
        level = math.sqrt(4.0 + np.sum(g**2))
        block = polar(np.hstack([g.sum(0), level / step * np.eye(2)]))[:, :4]
        np.testing.assert_allclose(learner.play().numpy(), -1.5 * block, atol=1e-12)
    first = (math.sqrt(2) - step) * np.linalg.norm(g[0])
    assert learner.bound().item() == pytest.approx(1.5 * ((step + 2 / step) * level + first))


def test_scalar_gbpa_regret_needs_the_root_of_m():
    # Random signs times I, 64 games: the regret of every learner is m·E|Σ±1| on average, above the
    # D√Σ‖G‖_F² = √(mT) that one would expect of a scalar method.
    games, m, rounds = 64, 9, 40
    learner = build(ScalarGBPA, (games, m, m))
    ledger = Ledger((games, m, m))
    for t in range(rounds):
        sign = noise.signs((games, 1, 1), seed=5, step=t, dtype=F64)
        gradient = sign * torch.eye(m, dtype=F64)
        ledger.record(gradient, learner.play())
        learner.observe(gradient)
    regret = learner.certificate().regret.numpy()
    error = scipy.stats.t.ppf(0.999, games - 1) * regret.std(ddof=1) / math.sqrt(games)
    assert regret.mean() - error > math.sqrt(m * rounds)
    assert learner.certificate().holds


# ---- states and bad input ----------------------------------------------------------------------


def played(kind, shape=(2, 4), rounds=5, **options):
    learner = build(kind, shape, **options)
    for _ in rounds_of(learner, streams.gaussian(shape, dtype=F64), rounds):
        pass
    return learner


def same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, dict):
            same(value, b[name])
            continue
        equal = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert equal, name


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (2, 2, 3)], ids=str)
@pytest.mark.parametrize("kind", ALL)
def test_a_resumed_game_repeats_bit_for_bit(kind, shape, tmp_path):
    stream, learner = streams.gaussian(shape, dtype=F64), played(kind, shape)
    learner.play()
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    resumed = build(kind, shape)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for (_, x), (_, y) in zip(
        rounds_of(learner, stream, 4), rounds_of(resumed, stream, 4), strict=True
    ):
        assert torch.equal(x, y)
    same(learner.state_dict(), resumed.state_dict())
    assert torch.equal(learner.bound(), resumed.bound())


@pytest.mark.parametrize("kind", DESCENT)
def test_a_state_of_other_options_is_refused(kind):
    learner = played(kind)
    before = learner.state_dict()
    for change in ({"epsilon": 0.1}, {"projection": "none"}, {"eta": 1.0}, {"tolerance": 1e-4}):
        with pytest.raises(ValueError, match="the state has"):
            learner.load_state_dict(kind((2, 4), dtype=F64, **change).state_dict())
    with pytest.raises(ValueError, match="learner"):
        learner.load_state_dict(played(ScalarGBPA).state_dict())
    same(before, learner.state_dict())


@pytest.mark.parametrize(
    ("gradient", "error", "match"),
    [
        (torch.zeros(4, 2, dtype=F64), ValueError, "shape"),
        (torch.zeros(2, 4), TypeError, "dtype"),
        (torch.full((2, 4), float("nan"), dtype=F64), ValueError, "finite"),
        ([[0.0] * 4] * 2, TypeError, "Tensor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ALL)
def test_a_bad_gradient_leaves_the_state_untouched(kind, gradient, error, match):
    learner = played(kind)
    learner.play()
    before = learner.state_dict()
    with pytest.raises(error, match=match):
        learner.observe(gradient)
    same(before, learner.state_dict())


@pytest.mark.parametrize("kind", [KroneckerFTRL, ScalarGBPA])
def test_a_gradient_above_the_bound_is_refused(kind):
    learner = build(kind, (2, 4))
    learner.play()
    before = learner.state_dict()
    with pytest.raises(ValueError, match="gradient_bound"):
        learner.observe(torch.full((2, 4), 0.6, dtype=F64))  # of both norms √8·0.6 = 1.7
    same(before, learner.state_dict())


@pytest.mark.parametrize("bound", [0.0, -1.0, 1e200, 1e-200, math.nan])
@pytest.mark.parametrize("kind", [KroneckerFTRL, ScalarGBPA])
def test_a_bad_gradient_bound(kind, bound):
    with pytest.raises(ValueError, match="gradient_bound"):
        kind((2, 3), gradient_bound=bound)


@pytest.mark.parametrize("kind", DESCENT)
def test_a_gradient_whose_gram_overflows_is_refused(kind):
    learner = kind((2, 3), dtype=F64)
    learner.play()
    before = learner.state_dict()
    with pytest.raises(ValueError, match="Gram"):
        learner.observe(torch.full((2, 3), 1e200, dtype=F64))
    same(before, learner.state_dict())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"radius": 0.0}, ValueError),
        ({"eta": -1.0}, ValueError),
        ({"epsilon": -0.1}, ValueError),
        ({"projection": "frobenius"}, ValueError),
        ({"solver": "newton"}, ValueError),
        ({"tolerance": 0.0}, ValueError),
        ({"max_iterations": 0}, ValueError),
        ({"dtype": torch.float16}, TypeError),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", DESCENT)
def test_bad_options(kind, change, error):
    with pytest.raises(error, match=next(iter(change))):
        kind((2, 3), **change)


@pytest.mark.parametrize("learner", [Shampoo, OneSidedShampoo, KroneckerFTRL])
def test_a_plain_learner_refuses_a_discount(learner):
    with pytest.raises(ValueError, match="plain game only"):
        learner((3, 4), discount=0.9)
