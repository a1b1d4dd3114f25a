"""Appendix B: Table 2 by hand, and the algorithms played in NumPy under their bounds."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.online import theory

DIMENSION = 5


def clip_to(ball, x, radius=1.0):
    if ball == "linf":
        return np.clip(x, -radius, radius)
    return x * min(1.0, radius / max(np.linalg.norm(x), 1e-300))


def streams(seed, rounds=150, d=DIMENSION):
    rng = np.random.default_rng(seed)
    gaussian = rng.standard_normal((rounds, d))
    return {
        "gaussian": gaussian,
        "alternating": np.array([0.5] + [(-1.0) ** t for t in range(1, rounds)])[:, None]
        * np.ones(d),
        "growing": gaussian * 1.1 ** np.arange(rounds)[:, None],
        "sparse": gaussian * (rng.random((rounds, d)) < 0.1),
        "heavy": gaussian * rng.lognormal(0, 3, (rounds, 1)),
        "adversary": None,  # answers with the sign of what was played
    }


def play(gradients, step, rounds=150, d=DIMENSION, seed=0):
    """The gradients met and the actions played by `step(gradients so far) → next action`."""
    rng = np.random.default_rng(seed)
    x, met, actions = np.zeros(d), [], []
    for t in range(rounds):
        answer = np.sign(x) + 0.1 * rng.standard_normal(d)
        gradient = answer if gradients is None else gradients[t]
        met.append(gradient)
        actions.append(x)
        x = step(np.stack(met), x)
    return np.stack(met), np.stack(actions)


def regret(met, actions, ball):
    total = met.sum(0)
    best = np.abs(total).sum() if ball == "linf" else np.linalg.norm(total)
    return float(np.sum(met * actions) + best)


def ratio(top, bottom):
    """top/bottom with 0/0 = 0."""
    return np.divide(top, bottom, out=np.zeros_like(top), where=np.asarray(bottom) > 0)


def root(met, preconditioner):
    squares = np.sum(met**2, 0)
    return (
        np.full(met.shape[1], math.sqrt(squares.sum()))
        if preconditioner == "scalar"
        else (np.sqrt(squares))
    )


CLOSED = [("scalar", "l2"), ("scalar", "linf"), ("diagonal", "linf")]  # projections are explicit


@pytest.mark.parametrize("name", ["gaussian", "alternating", "growing", "sparse", "adversary"])
@pytest.mark.parametrize(("preconditioner", "ball"), CLOSED)
def test_ogd_stays_below_its_bound(name, preconditioner, ball):
    norm = math.sqrt(DIMENSION) if (preconditioner, ball) == ("scalar", "linf") else 1.0
    eta = 2 * norm / math.sqrt(2)

    def step(met, x):
        return clip_to(ball, x - eta * ratio(met[-1], root(met, preconditioner)))

    met, actions = play(streams(0)[name], step)
    bound = theory.adagrad_bound(
        torch.from_numpy(np.sum(met**2, 0)),
        preconditioner=preconditioner,
        update="ogd",
        ball=ball,
        radius=1.0,
    )
    assert regret(met, actions, ball) <= bound.item()


@pytest.mark.parametrize("name", ["gaussian", "alternating", "growing", "heavy", "adversary"])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(("preconditioner", "ball"), CLOSED)
def test_ftrl_stays_below_its_bound(name, running, preconditioner, ball):
    norm = math.sqrt(DIMENSION) if (preconditioner, ball) == ("scalar", "linf") else 1.0
    eta, gradients = norm / math.sqrt(2), streams(1)[name]
    axis_norm = (
        (lambda g: np.linalg.norm(g, axis=1))
        if preconditioner == "scalar"
        else (lambda g: np.abs(g).max(1))
    )
    known = 3.0 if gradients is None else float(axis_norm(gradients).max())

    def step(met, _):
        delta = axis_norm(met).max() if running else known
        return clip_to(ball, -eta * ratio(met.sum(0), delta + root(met, preconditioner)))

    met, actions = play(gradients, step)
    norms = axis_norm(met)
    delta, excess = known, 0.0
    assert running or known >= norms.max()
    if running:
        delta = float(norms.max())
        before = np.maximum.accumulate(norms)[:-1, None]
        if preconditioner == "scalar":
            excess = np.maximum(norms[1:] - before[:, 0], 0).sum()
        else:
            excess = np.maximum(np.abs(met[1:]) - before, 0).sum()
    bound = theory.adagrad_bound(
        torch.from_numpy(np.sum(met**2, 0)),
        preconditioner=preconditioner,
        update="ftrl",
        ball=ball,
        radius=1.0,
        delta=delta,
        excess=float(excess),
    )
    assert regret(met, actions, ball) <= bound.item()


@pytest.mark.parametrize("name", ["gaussian", "alternating", "growing", "heavy", "adversary"])
@pytest.mark.parametrize(("preconditioner", "ball"), CLOSED)
def test_scale_free_ftrl_stays_below_its_bound(name, preconditioner, ball):
    norm = math.sqrt(DIMENSION) if (preconditioner, ball) == ("scalar", "linf") else 1.0
    eta = norm / 2**0.75

    def step(met, _):
        return clip_to(ball, -eta * ratio(met.sum(0), root(met, preconditioner)))

    met, actions = play(streams(2)[name], step)
    peak = (
        np.linalg.norm(met, axis=1).max()
        if preconditioner == "scalar"
        else np.abs(met).max(0).sum()
    )
    bound = theory.scale_free_adagrad_bound(
        torch.from_numpy(np.sum(met**2, 0)),
        peak=float(peak),
        preconditioner=preconditioner,
        ball=ball,
        radius=1.0,
    )
    assert regret(met, actions, ball) <= bound.item()


def test_scale_free_ftrl_needs_its_peak_term():
    # a tiny gradient sends the action to the border, a large one answers: regret ≈ 2·peak
    eta, gradients = 2.0, np.array([[1e-9], [-1.0]])

    def step(met, _):
        return clip_to("l2", -eta * ratio(met.sum(0), root(met, "scalar")))

    met, actions = play(gradients, step, rounds=2, d=1)
    moment = torch.from_numpy(np.sum(met**2, 0))
    shared = {"preconditioner": "scalar", "ball": "l2", "radius": 1.0, "eta": 0.1}
    free = theory.scale_free_adagrad_bound(moment, peak=1.0, **shared).item()
    leading = (1 / 0.2 + math.sqrt(2) * 0.1) * math.sqrt(moment.item())
    assert free == pytest.approx(leading + 2 * (2 + math.sqrt(2)), rel=1e-12)
    assert regret(met, actions, "l2") == pytest.approx(2.0, rel=1e-6) and free >= 2.0


@pytest.mark.parametrize("name", ["gaussian", "alternating", "growing", "adversary"])
def test_full_matrix_ftrl_on_the_l2_ball_stays_below_its_bound(name):
    eta, gradients = 1 / math.sqrt(2), streams(3, rounds=60)[name]
    known = 4.0 if gradients is None else float(np.linalg.norm(gradients, axis=1).max())

    def step(met, _):
        values, vectors = np.linalg.eigh(met.T @ met)
        weights = (known + np.sqrt(np.maximum(values, 0))) / eta
        linear = vectors.T @ met.sum(0)

        def overshoot(shift):
            return np.linalg.norm(linear / (weights + shift)) - 1

        if overshoot(0) <= 0:
            return -vectors @ (linear / weights)
        shift = scipy.optimize.brentq(overshoot, 0, np.linalg.norm(linear) + 1, xtol=1e-12)
        return -vectors @ (linear / (weights + shift))

    met, actions = play(gradients, step, rounds=60)
    bound = theory.adagrad_bound(
        torch.from_numpy(met.T @ met),
        preconditioner="full",
        update="ftrl",
        ball="l2",
        radius=1.0,
        delta=known,
    )
    assert regret(met, actions, "l2") <= bound.item()


# ---- the table by hand -------------------------------------------------------------------------

MOMENT = torch.tensor([9.0, 16.0, 0.0, 144.0], dtype=torch.float64)  # √sum 13, sum of roots 19
TRACE = {"scalar": 13.0, "diagonal": 19.0, "full": 19.0}


@pytest.mark.parametrize("preconditioner", ["scalar", "diagonal", "full"])
@pytest.mark.parametrize("update", ["ogd", "ftrl", "proximal"])
@pytest.mark.parametrize("ball", ["l2", "linf"])
def test_table_two_by_hand(preconditioner, update, ball):
    moment = MOMENT.diag() if preconditioner == "full" else MOMENT
    inner, euclidean = 3.0, 3.0 * (2.0 if ball == "linf" else 1.0)  # √d = 2
    if preconditioner != "diagonal":
        inner = euclidean
    reach = {"ftrl": 1}.get(update, 2)
    shared = {"preconditioner": preconditioner, "update": update, "ball": ball, "radius": 3.0}
    trace = TRACE[preconditioner]
    optimal = theory.adagrad_bound(moment, **shared).item()
    assert optimal == pytest.approx(math.sqrt(2) * reach * inner * trace)
    general = theory.adagrad_bound(moment, eta=0.5, delta=0.7, excess=0.1, **shared).item()
    by_hand = ((reach * inner) ** 2 + 0.5) * trace + 0.7 * (reach * euclidean) ** 2
    assert general == pytest.approx(by_hand + 2 * inner * 0.1)
    assert optimal <= theory.adagrad_bound(moment, eta=0.5, **shared).item()


@settings(max_examples=50, deadline=None)
@given(squares=st.lists(st.floats(0, 1e6), min_size=1, max_size=6))
def test_the_ranking_flips_between_the_balls(squares):
    moment = torch.tensor(squares, dtype=torch.float64)

    def bound(preconditioner, ball):
        return theory.adagrad_bound(
            moment, preconditioner=preconditioner, update="ogd", ball=ball, radius=1.0
        ).item()

    rounding = 1 + 1e-12
    assert bound("scalar", "l2") <= bound("diagonal", "l2") * rounding
    assert bound("diagonal", "linf") <= bound("scalar", "linf") * rounding
    assert bound("diagonal", "linf") == bound("diagonal", "l2")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 5), rounds=st.integers(1, 8))
def test_remark_b2(seed, d, rounds):
    gradients = np.random.default_rng(seed).standard_normal((rounds, d))
    left, right = theory.full_against_scalar(torch.from_numpy(gradients.T @ gradients))
    assert left.item() == pytest.approx(np.linalg.norm(gradients), rel=1e-12)
    singular = np.linalg.svd(gradients, compute_uv=False).sum()  # Tr √(AᵀA) = ‖A‖_*
    # eigenvalues of a rank-deficient Gram are ±1e-15, their roots 3e-8 each
    assert right.item() == pytest.approx(singular, abs=1e-6)
    assert left <= right * (1 + 1e-12)


# ---- Gaussian perturbations --------------------------------------------------------------------


@pytest.mark.parametrize("d", [2, 3, 10, 1000])
def test_gaussian_constants_are_moments_of_chi(d):
    alpha, beta = theory.gaussian_ftpl_constants(d)
    law = scipy.stats.chi(d)
    assert alpha == pytest.approx(law.mean(), rel=1e-9)
    center = law.mean()
    inverse, _ = scipy.integrate.quad(
        lambda y: law.pdf(y) / y, 0, center + 12, points=[center], limit=200
    )
    assert beta == pytest.approx(inverse, rel=1e-6)
    loose = theory.ftpl_constants(1, d)[1] if d >= 3 else math.inf
    assert beta < loose and alpha * beta > 1


def test_gaussian_constant_of_the_plane_by_hand():
    alpha, beta = theory.gaussian_ftpl_constants(2)
    assert (alpha, beta) == pytest.approx((math.sqrt(math.pi / 2), math.sqrt(math.pi / 2)))


@pytest.mark.parametrize("name", ["gaussian", "alternating"])
def test_gaussian_ftpl_stays_below_its_bound(name):
    # d = 3: E[(s+ℓu)/‖s+ℓu‖] is along s with length f(‖s‖/ℓ), an integral over the cosine's law
    gradients = streams(4, rounds=60, d=3)[name]
    alpha, beta = theory.gaussian_ftpl_constants(3)
    eta, level = math.sqrt(alpha / beta), float(np.linalg.norm(gradients, axis=1).max())
    noise = np.random.default_rng(5).standard_normal((20_000, 3))
    noise = np.concatenate([noise, -noise])
    total, square, action, loss = np.zeros(3), 0.0, np.zeros(3), 0.0
    for gradient in gradients:
        loss += gradient @ action
        total, square = total + gradient, square + gradient @ gradient
        moved = total + math.sqrt(level**2 + square) / eta * noise
        action = -np.mean(moved / np.linalg.norm(moved, axis=1, keepdims=True), 0)
    bound = theory.gaussian_ftpl_bound(
        torch.tensor(square),
        dimension=3,
        radius=1.0,
        gradient_bound=level,
        first_norm=float(np.linalg.norm(gradients[0])),
    )
    product = math.sqrt(alpha * beta)
    first = (1 - product) * np.linalg.norm(gradients[0])
    assert bound.item() == pytest.approx(2 * product * math.sqrt(level**2 + square) + first)
    # the mean over 40,000 draws errs by 1/200 per round at most, on gradients below `level`
    assert loss + np.linalg.norm(total) <= bound.item() + 60 * level / 200


def test_refusals():
    good = {"preconditioner": "scalar", "update": "ogd", "ball": "l2", "radius": 1.0}
    for change, message in [
        ({"preconditioner": "block"}, "preconditioner"),
        ({"update": "adam"}, "update"),
        ({"ball": "l1"}, "ball"),
        ({"radius": -1.0}, "radius"),
        ({"delta": -0.1}, "delta"),
        ({"eta": 0.0}, "eta"),
    ]:
        with pytest.raises(ValueError, match=message):
            theory.adagrad_bound(MOMENT, **{**good, **change})
    with pytest.raises(ValueError, match="moment must be ≥ 0"):
        theory.adagrad_bound(-MOMENT, **good)
    with pytest.raises(ValueError, match="one sum of squares per coordinate"):
        theory.adagrad_bound(torch.tensor(1.0), **good)
    with pytest.raises(ValueError, match="dimension"):
        theory.gaussian_ftpl_constants(1)
