"""AdaGrad on vectors, step for step against cvxpy, and under the bounds of Table 2."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import STREAMS, ledger_of, rounds_of
from nucleon.online import play, streams, theory
from nucleon.online.learners.adagrad import AdaGradFTRL, AdaGradOGD
from nucleon.online.regret import BoxLedger, Ledger

F64 = torch.float64
SHAPES = [(1, 1), (1, 5), (5, 1), (2, 1, 4)]
PRECONDITIONERS = ("scalar", "diagonal", "full")
OFFSETS = ("stated", "running", "clip", "scale-free", "proximal")
WAYS = ("ogd", *OFFSETS)
CASES = [
    (way, preconditioner, ball)
    for way in WAYS
    for preconditioner in PRECONDITIONERS
    for ball in ("l2", "linf")
    if (way, preconditioner) != ("scale-free", "full")
]


def build(way, shape, *, bound=1.0, **options):
    options = {"dtype": F64, **options}
    if way == "ogd":
        return AdaGradOGD(shape, **options)
    return AdaGradFTRL(shape, offset=way, delta=bound if way == "stated" else None, **options)


# ---- the cross product -------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "preconditioner", "ball"), CASES)
def test_actions_stay_in_the_ball_and_regret_under_its_bound(way, preconditioner, ball):
    radius, bound = 2.5, 1.5
    for name, stream in STREAMS.items():
        for shape in SHAPES:
            source = stream(shape, bound=bound, dtype=F64)
            options = {"preconditioner": preconditioner, "ball": ball, "radius": radius}
            learner = build(way, shape, bound=bound, **options)
            for t, (_, action) in enumerate(rounds_of(learner, source, 8), start=1):
                assert action.shape == shape and (t > 1 or not action.any())
                norm = torch.linalg.vector_norm(
                    action.flatten(-2), ord=2 if ball == "l2" else torch.inf, dim=-1
                )
                assert norm.max() <= radius * (1 + 1e-9)
            certificate = learner.certificate()
            assert certificate.holds, (name, shape)
            # Exact up to rounding; the box program ends far below its tolerance of 1e-8.
            assert (learner.gaps <= 1e-8 * certificate.bound).all(), (name, shape)


def wild(seed, rounds=60, d=4):
    """Gradients over ten orders of magnitude, growing, with coordinates that sleep."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((rounds, 1, d)) * rng.lognormal(0, 4, (rounds, 1, 1))
    return torch.from_numpy(g * (rng.random((rounds, 1, d)) < 0.5))


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from([case for case in CASES if case[0] != "stated"]),
    seed=st.integers(0, 10**6),
)
def test_bounds_that_need_no_delta_hold_on_wild_gradients(case, seed):
    way, preconditioner, ball = case
    learner = build(way, (1, 4), preconditioner=preconditioner, ball=ball)
    for gradient in wild(seed, rounds=25):
        learner.play()
        learner.observe(gradient)
    assert learner.certificate().holds


# ---- every step, solved by cvxpy ---------------------------------------------------------------


def preconditioner_of(kind, met, delta):
    squares = met.T @ met
    if kind == "scalar":
        root = math.sqrt(np.trace(squares)) * np.eye(met.shape[1])
    elif kind == "diagonal":
        root = np.diag(np.sqrt(np.diag(squares)))
    else:
        values, vectors = np.linalg.eigh(squares)
        root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return delta * np.eye(met.shape[1]) + root


def clipped(kind, met):
    """Each gradient cut to the largest norm of those before it, by the definition."""
    kept = [met[0]]
    for t in range(1, len(met)):
        if kind == "diagonal":
            level = np.abs(met[:t]).max()
            kept.append(np.clip(met[t], -level, level))
        else:
            level = np.linalg.norm(met[:t], axis=1).max()
            kept.append(met[t] * min(1.0, level / np.linalg.norm(met[t])))
    return np.stack(kept)


def twin_step(way, kind, ball, met, actions, radius, eta, delta):
    """x_{t+1} by cvxpy from the gradients and actions so far, as the method is defined."""
    size = np.abs(met).max() if kind == "diagonal" else np.linalg.norm(met, axis=1).max()
    if way == "clip":
        met = clipped(kind, met)
    offset = {"stated": delta, "running": size, "clip": size}.get(way, 0.0)
    metrics = [preconditioner_of(kind, met[:t], offset) for t in range(1, len(met) + 1)]
    x = cp.Variable(met.shape[1])

    def distance(center, metric):
        return cp.quad_form(x - center, cp.psd_wrap(metric)) / (2 * eta)

    if way == "ogd":
        cost = met[-1] @ x + distance(actions[-1], metrics[-1])
    elif way == "proximal":
        before = [np.zeros_like(metrics[0]), *metrics[:-1]]
        terms = zip(actions, metrics, before, strict=True)
        cost = met.sum(0) @ x + sum(distance(a, now - old) for a, now, old in terms)
    else:
        cost = met.sum(0) @ x + distance(0.0, metrics[-1])
    limit = cp.norm(x, 2) if ball == "l2" else cp.norm(x, "inf")
    cp.Problem(cp.Minimize(cost), [limit <= radius]).solve(solver="CLARABEL")
    return x.value


@pytest.mark.parametrize(("way", "preconditioner", "ball"), CASES)
def test_a_step_is_the_program_that_defines_it(way, preconditioner, ball):
    # Four rounds in three dimensions: the last H is positive definite, so x is unique.
    met = np.random.default_rng(4).standard_normal((4, 3)) + 0.4
    met[0] *= 0.3
    met[3] *= 1.5  # above everything before it, so that clipping cuts
    options = {"preconditioner": preconditioner, "ball": ball, "radius": 0.6, "eta": 0.5}
    learner = build(way, (1, 3), bound=5.0, **options)
    actions = []
    for gradient in met:
        actions.append(learner.play().numpy()[0])
        learner.observe(torch.from_numpy(gradient[None]))
    expected = twin_step(way, preconditioner, ball, met, actions, 0.6, 0.5, 5.0)
    # λ_min(H)/η ≥ 0.6 here and cvxpy's value is within 1e-8: ‖Δx‖² ≤ 2·1e-8/0.6.
    np.testing.assert_allclose(learner.play().numpy()[0], expected, atol=2e-4)


# ---- ways around δ -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "preconditioner", "ball"), [case for case in CASES if case[0] != "stated"]
)
def test_without_a_stated_delta_the_scale_of_the_gradients_does_not_matter(
    way, preconditioner, ball
):
    plain, scaled = (build(way, (1, 4), preconditioner=preconditioner, ball=ball) for _ in range(2))
    for gradient in wild(1, rounds=20):
        np.testing.assert_allclose(plain.play().numpy(), scaled.play().numpy(), atol=1e-9)
        plain.observe(gradient)
        scaled.observe(gradient * 2.0**30)
    assert scaled.bound().item() == pytest.approx(plain.bound().item() * 2.0**30, rel=1e-9)


def test_excess_and_delta_by_hand():
    # One dimension; norms 1, 3, 2, 5: running maxima 1, 3, 3, 5, excess (3−1) + (5−3).
    for way, moment in (("running", 1 + 9 + 4 + 25), ("clip", 1 + 1 + 4 + 9)):
        learner = build(way, (1, 1), preconditioner="scalar", ball="l2", radius=2.0)
        for value in (1.0, -3.0, 2.0, -5.0):
            learner.play()
            learner.observe(torch.tensor([[value]], dtype=F64))
        assert learner.excess == 4.0 and learner.peak == 5.0 and learner.moment == moment
        eta = 2.0 / math.sqrt(2)
        bound = (4 / (2 * eta) + eta) * math.sqrt(moment) + 5.0 * 4 / (2 * eta) + 4.0 * 4.0
        assert learner.bound().item() == pytest.approx(bound + learner.gaps.item(), rel=1e-12)


@pytest.mark.parametrize(("preconditioner", "peak"), [("scalar", 5.0), ("diagonal", 7.0)])
def test_the_scale_free_bound_by_hand(preconditioner, peak):
    learner = build("scale-free", (1, 2), preconditioner=preconditioner, ball="l2", eta=0.5)
    for gradient in ([3.0, 0.0], [0.0, -4.0], [0.0, 3.0], [3.0, 4.0]):
        learner.play()
        learner.observe(torch.tensor([gradient], dtype=F64))
    # Σg² = (18, 41); max‖g‖₂ = 5, coordinate maxima 3 and 4.
    trace = math.sqrt(59) if preconditioner == "scalar" else math.sqrt(18) + math.sqrt(41)
    expected = (1 / (2 * 0.5) + math.sqrt(2) * 0.5) * trace + (2 + math.sqrt(2)) * 2 * peak
    assert learner.bound().item() == pytest.approx(expected, rel=1e-12)


def test_a_sleeping_game_of_a_batch_pays_nothing_for_its_first_gradient():
    learner = build("running", (2, 1, 2), preconditioner="diagonal")
    first = torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]], dtype=F64)
    for gradient in (first, torch.full((2, 1, 2), 3.0, dtype=F64)):
        learner.play()
        learner.observe(gradient)
    assert learner.excess.tolist() == [2.0 + 3.0 - 1.0, 0.0]


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_gradient_above_delta_is_refused(preconditioner):
    learner = build("stated", (1, 4), bound=1.0, preconditioner=preconditioner)
    learner.play()
    before = learner.state_dict()
    ones = torch.full((1, 4), 0.9, dtype=F64)  # ℓ∞ norm 0.9, ℓ2 norm 1.8
    if preconditioner == "diagonal":
        learner.observe(ones)
        learner.play()
        ones, before = 2 * ones, learner.state_dict()
    with pytest.raises(ValueError, match="delta"):
        learner.observe(ones)
    assert all(
        torch.equal(value, before[name])
        for name, value in learner.state_dict().items()
        if isinstance(value, torch.Tensor)
    )


# ---- what Appendix B compares ------------------------------------------------------------------


def games_on_both_balls(way, preconditioner):
    """(regret, bound) on ℓ2 and ℓ∞, eight games against a dense alternating direction."""
    figures = {}
    for ball in ("l2", "linf"):
        shape = (8, 1, 16)
        source = streams.alternating(shape, dtype=F64, seed=3)
        learner = build(way, shape, preconditioner=preconditioner, ball=ball)
        ledger_of(learner, source, 100)
        certificate = learner.certificate()
        assert certificate.holds
        figures[ball] = certificate.regret.mean().item(), certificate.bound.mean().item()
    return figures


@pytest.mark.parametrize("way", ["ogd", "running"])
def test_the_ranking_flips_between_the_balls(way):
    scalar, diagonal = (games_on_both_balls(way, p) for p in ("scalar", "diagonal"))
    for measured in (0, 1):  # the regret, then the bound
        assert scalar["l2"][measured] < 0.7 * diagonal["l2"][measured]
        assert diagonal["linf"][measured] < 0.95 * scalar["linf"][measured]


@pytest.mark.parametrize("stream", ["gaussian", "sparse", "ill-conditioned", "drifting"])
@pytest.mark.parametrize("way", ["ogd", "stated", "proximal"])
def test_remark_b2_the_full_matrix_never_has_the_smaller_bound(way, stream):
    source = STREAMS[stream]((1, 6), dtype=F64)
    for ball in ("l2", "linf"):
        bounds = {}
        for preconditioner in ("scalar", "full"):
            learner = build(way, (1, 6), preconditioner=preconditioner, ball=ball)
            ledger_of(learner, source, 20)
            bounds[preconditioner] = learner.bound()
        assert bounds["scalar"] <= bounds["full"] * (1 + 1e-9)


def test_the_bound_is_table_two():
    gradients = np.random.default_rng(0).uniform(-0.3, 0.4, (9, 4))
    for way, preconditioner, ball in CASES:
        if way not in ("ogd", "stated", "proximal"):
            continue
        learner = build(way, (1, 4), preconditioner=preconditioner, ball=ball, radius=1.3)
        for gradient in gradients:
            learner.play()
            learner.observe(torch.from_numpy(gradient[None]))
        squares = gradients.T @ gradients
        trace = {
            "scalar": math.sqrt(np.trace(squares)),
            "diagonal": np.sqrt(np.diag(squares)).sum(),
            "full": np.linalg.svd(gradients, compute_uv=False).sum(),
        }[preconditioner]
        norm = 1.3 * (2.0 if ball == "linf" and preconditioner != "diagonal" else 1.0)
        euclidean = 1.3 * (2.0 if ball == "linf" else 1.0)
        reach = 1 if way == "stated" else 2
        eta = reach * norm / math.sqrt(2)
        expected = math.sqrt(2) * reach * norm * trace
        if way == "stated":
            expected += euclidean**2 / (2 * eta)  # δ = 1
        assert learner.bound().item() == pytest.approx(expected, rel=1e-6), (way, ball)


# ---- the game of vectors -----------------------------------------------------------------------


def test_the_box_ledger_keeps_the_regret_of_the_box():
    rng = np.random.default_rng(5)
    gradients, actions = rng.standard_normal((2, 7, 1, 3))
    ledger = BoxLedger((1, 3), radius=2.0)
    for gradient, action in zip(gradients, actions, strict=True):
        ledger.record(torch.from_numpy(gradient), torch.from_numpy(action))
    x = cp.Variable(3)
    best = cp.Problem(cp.Minimize(gradients.sum((0, 1)) @ x), [cp.norm(x, "inf") <= 2.0]).solve()
    assert ledger.regret().item() == pytest.approx(np.sum(gradients * actions) - best, abs=1e-6)
    resumed = BoxLedger((1, 3), radius=2.0)
    resumed.load_state_dict(ledger.state_dict())
    assert resumed.regret() == ledger.regret()
    with pytest.raises(ValueError, match="ball"):
        resumed.load_state_dict(Ledger((1, 3), radius=2.0).state_dict())


def test_vectors_are_played_like_matrices():
    learner = AdaGradFTRL((1, 6), dtype=F64)
    source = streams.gaussian((1, 6), dtype=F64)
    trace = play(learner, source, 50)
    assert trace.certificate.holds and trace.learner == "adagrad-ftrl"


def test_rows_columns_and_games_of_a_batch_agree():
    gradients = np.random.default_rng(6).uniform(-0.5, 0.6, (8, 2, 1, 3))
    for way, preconditioner, ball in CASES:
        options = {"preconditioner": preconditioner, "ball": ball}
        batch = build(way, (2, 1, 3), **options)
        row, column = build(way, (1, 3), **options), build(way, (3, 1), **options)
        for stack in torch.from_numpy(gradients):
            x = batch.play()
            np.testing.assert_allclose(row.play(), x[0], atol=1e-7)
            np.testing.assert_allclose(column.play(), x[1].mT, atol=1e-7)
            batch.observe(stack)
            row.observe(stack[0])
            column.observe(stack[1].mT.contiguous())


@pytest.mark.parametrize("way", WAYS)
def test_float32_games(way):
    learner = build(way, (1, 5), bound=1.0, ball="l2", dtype=torch.float32)
    source = streams.heavy_tailed((1, 5), dtype=torch.float32)
    ledger_of(learner, source, 40)
    certificate = learner.certificate()
    assert certificate.holds and learner.play().dtype == torch.float32


# ---- states and bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(("way", "preconditioner", "ball"), CASES)
def test_a_resumed_game_repeats_bit_for_bit(way, preconditioner, ball, tmp_path):
    shape = (2, 1, 3)
    options = {"preconditioner": preconditioner, "ball": ball}
    stream, learner = streams.gaussian(shape, dtype=F64), build(way, shape, **options)
    for _ in rounds_of(learner, stream, 4):
        pass
    learner.play()
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    resumed = build(way, shape, **options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for (_, x), (_, y) in zip(
        rounds_of(learner, stream, 4), rounds_of(resumed, stream, 4), strict=True
    ):
        assert torch.equal(x, y)
    assert torch.equal(learner.bound(), resumed.bound())
    other = build(way, shape, **{**options, "eta": 3.0})
    with pytest.raises(ValueError, match="the state has"):
        other.load_state_dict(learner.state_dict())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("gradient", "error"),
    [
        (torch.zeros(3, 1, dtype=F64), ValueError),
        (torch.zeros(3, dtype=F64), ValueError),
        (torch.zeros(1, 3), TypeError),
        (torch.tensor([[1.0, math.nan, 0.0]], dtype=F64), ValueError),
        (None, TypeError),
    ],
    ids=str,
)
def test_a_bad_gradient_leaves_the_state_untouched(way, gradient, error):
    learner = build(way, (1, 3))
    learner.play()
    with pytest.raises(error, match="gradient"):
        learner.observe(gradient)
    assert learner.rounds == 0 and not learner.moment.any()


@pytest.mark.parametrize(
    ("way", "preconditioner", "ball"), [case for case in CASES if case[0] != "stated"]
)
def test_a_gradient_whose_square_overflows_is_refused(way, preconditioner, ball):
    learner = build(way, (1, 3), preconditioner=preconditioner, ball=ball)
    learner.play()
    with pytest.raises(ValueError, match="Gram matrix"):
        learner.observe(torch.full((1, 3), 1e200, dtype=F64))
    assert learner.rounds == 0 and not learner.moment.any() and not learner.center.any()


@pytest.mark.parametrize("kind", [AdaGradOGD, AdaGradFTRL])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"preconditioner": "block"}, ValueError),
        ({"ball": "l1"}, ValueError),
        ({"eta": 0.0}, ValueError),
        ({"delta": -1.0}, ValueError),
        ({"tolerance": 0.0}, ValueError),
        ({"max_iterations": 0}, ValueError),
        ({"radius": math.inf}, ValueError),
        ({"dtype": torch.bfloat16}, TypeError),
    ],
    ids=str,
)
def test_bad_options(kind, change, error):
    with pytest.raises(error, match=next(iter(change))):
        kind((1, 3), **change)


def test_other_bad_options():
    for shape in [(2, 3), (3,), (4, 2, 3)]:
        with pytest.raises(ValueError, match="shape"):
            AdaGradOGD(shape)
    with pytest.raises(ValueError, match="offset"):
        AdaGradFTRL((1, 3), offset="guess")
    with pytest.raises(ValueError, match="sets its own delta"):
        AdaGradFTRL((1, 3), offset="running", delta=1.0)
    with pytest.raises(ValueError, match="scale-free"):
        AdaGradFTRL((1, 3), offset="scale-free", preconditioner="full")


def test_the_default_eta_makes_the_bound_smallest():
    gradients = np.random.default_rng(7).uniform(-0.3, 0.4, (6, 3))
    for way, preconditioner, ball in CASES:
        bounds = []
        base = build(way, (1, 3), preconditioner=preconditioner, ball=ball).eta
        for factor in (0.8, 1.0, 1.25):
            options = {"preconditioner": preconditioner, "ball": ball, "eta": factor * base}
            learner = build(way, (1, 3), **options)
            for gradient in gradients:
                learner.play()
                learner.observe(torch.from_numpy(gradient[None]))
            leading = learner.bound() - learner.gaps
            if way in ("stated", "running", "clip"):  # without the terms of δ and the excess
                leading = theory.adagrad_bound(
                    learner.moment,
                    preconditioner=preconditioner,
                    update="ftrl",
                    ball=ball,
                    radius=1.0,
                    eta=learner.eta,
                )
            bounds.append(leading.item())
        assert bounds[1] == min(bounds), (way, preconditioner, ball)
