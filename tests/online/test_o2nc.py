"""O2NC against a NumPy twin of the protocol, against the optimizers, and its contract."""

import copy
import functools
import io
import math

import numpy as np
import pytest
import torch

from helpers import nuclear
from nucleon import noise
from nucleon.claims.oracle import conversion as conversion_oracle
from nucleon.online.learners import (
    FAML,
    FTL,
    FTPL,
    FTRL,
    AdaGradOGD,
    GaussianFTPL,
    OneSidedShampoo,
    Shampoo,
)
from nucleon.online.o2nc import meter as conversion
from nucleon.online.o2nc.meter import ConversionMeter
from nucleon.online.o2nc.optimizer import O2NC
from nucleon.optim import Leon, Muon, Pion

F64 = torch.float64
GAMMA, RHO, BOUND = 0.9, 0.7, 6.0
D = (1 - GAMMA) * RHO / (2 * GAMMA)
SHAPES = [(1, 1), (1, 6), (6, 1), (4, 4), (3, 7), (7, 3), (2, 3, 5)]


def gradients(shape, rounds, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64) / 2 for _ in range(rounds)]


def parameters(shapes=SHAPES):
    return [torch.nn.Parameter(gradients(s, 1, 50 + i)[0]) for i, s in enumerate(shapes)]


def make(params, learner=FAML, **options):
    usual = {"rho": RHO, "discount": GAMMA, "rounds": 12, "seed": 3, "gradient_bound": BOUND}
    return O2NC(params, learner, **{**usual, **options})


def run(optimizer, params, streams, start=0, stop=None):
    for t in range(start, len(streams[0]) if stop is None else stop):
        for param, stream in zip(params, streams, strict=True):
            param.grad = stream[t].clone()
        optimizer.step()


@pytest.mark.parametrize(
    ("learner", "options", "optimizer", "method"),
    [
        (FTL, {}, Muon, {"method": "svd"}),
        (FTPL, {"samples": 3}, Pion, {"method": "svd", "samples": 3, "gradient_bound": BOUND}),
        (FAML, {}, Leon, {"method": "eigh", "gradient_bound": BOUND}),
    ],
    ids=["muon", "pion", "leon"],
)
def test_the_conversion_of_a_learner_is_its_optimizer(learner, options, optimizer, method):
    """Step for step with the same noise; FTPL's default width is Pion's."""
    ours, theirs = parameters(), parameters()
    streams = [gradients(s, 12, i) for i, s in enumerate(SHAPES)]
    first = make(ours, learner, **options)
    options = {"momentum": GAMMA, "scale": "none", "step_length": "exponential", "seed": 3}
    second = optimizer(theirs, D, **options, **method)
    for t in range(12):
        run(first, ours, streams, t, t + 1)
        run(second, theirs, streams, t, t + 1)
        for a, b in zip(ours, theirs, strict=True):
            # Both are backward stable and D ≈ 0.04: rounding of at most 1e-15·cond a step, where
            # the totals of Gaussian gradients have a condition number below 1e4. Pion's Cholesky
            # adds 8m·eps of Λ.
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_the_protocol_by_hand():
    """W, W̄_t and W̄_τ from the definitions, with FTL as a NumPy polar factor."""
    (param,) = parameters([(3, 5)])
    stream, rounds = gradients((3, 5), 12), 12
    optimizer = make([param], FTL)
    weight, total = param.detach().numpy().copy(), np.zeros((3, 5))
    path = []
    for t in range(1, rounds + 1):
        path.append(weight.copy())
        total = GAMMA * total + stream[t - 1].numpy()
        u, _, vt = np.linalg.svd(total, full_matrices=False)
        s = noise.exponential((), seed=3, stream=-1, step=t, dtype=F64).item()
        weight = weight - s * D * u @ vt
        run(optimizer, [param], [stream], t - 1, t)
        np.testing.assert_allclose(param.detach().numpy(), weight, rtol=0, atol=1e-13)
        average = conversion_oracle.average(np.array(path), GAMMA)
        np.testing.assert_allclose(optimizer.average[0].numpy(), average, rtol=0, atol=1e-13)
        if t == int(optimizer.tau):
            output = average
    np.testing.assert_allclose(optimizer.output[0].numpy(), output, rtol=0, atol=1e-13)


def test_independent_processes_have_their_own_lengths_and_times():
    stack = torch.nn.Parameter(torch.zeros(64, 2, 3, dtype=F64))
    optimizer = make([stack], FTL, independent=True)
    stream = [g.expand(64, 2, 3) for g in gradients((2, 3), 2)]
    run(optimizer, [stack], [stream])
    lengths = stack.detach()[:, 0, 0]
    assert len(lengths.unique()) == 64 and len(optimizer.tau.unique()) > 5
    alone = torch.nn.Parameter(torch.zeros(2, 3, dtype=F64))
    single = make([alone], FTL)
    run(single, [alone], [[g[0] for g in stream]])
    torch.testing.assert_close(stack.detach()[0], alone.detach(), rtol=0, atol=1e-15)
    assert optimizer.tau[0] == single.tau


# ---------------------------------------------------------------------- averages and state


@pytest.mark.parametrize("learner", [FTL, FTRL, FTPL, FAML])
def test_a_resumed_run_and_a_copy_repeat_bit_for_bit(learner):
    shapes = [(3, 5), (5, 3), (2, 2, 3)]
    streams = [gradients(s, 12, i) for i, s in enumerate(shapes)]
    params = parameters(shapes)
    whole = make(params, learner)
    run(whole, params, streams, 0, 5)
    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed, twin = make(again, learner), copy.deepcopy(whole)
    run(whole, params, streams, 5)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (resumed, twin):
        assert other.round == 5 and not torch.equal(other.params[0], params[0])
        run(other, other.params, streams, 5)
        for name in ("params", "average", "output"):
            assert all(map(torch.equal, getattr(whole, name), getattr(other, name)))


def test_other_states_and_damaged_ones_are_refused_and_change_nothing():
    shapes = [(2, 3), (3, 3)]
    streams = [gradients(s, 12, i) for i, s in enumerate(shapes)]
    params = parameters(shapes)
    optimizer = make(params)
    run(optimizer, params, streams, 0, 2)

    def damaged(damage):
        state = optimizer.state_dict()
        damage(state)
        return state

    states = {
        "learner": make(parameters(shapes), FTL).state_dict(),
        "average.0 must be": make(parameters([(2, 4), (3, 3)])).state_dict(),
        "what state_dict": Muon(parameters(shapes)).state_dict(),
        "output.0 must be finite": damaged(lambda s: s["output.0"].fill_(torch.inf)),
        # The first learner's part is right.
        "total": damaged(lambda s: s["learners"][1].update(total=torch.zeros(1))),
        "argument": damaged(lambda s: s["learners"].pop()),
    }
    run(optimizer, params, streams, 2, 3)
    before = str(optimizer.state_dict())  # to four digits, all of it
    for word, state in states.items():
        with pytest.raises(ValueError, match=word):
            optimizer.load_state_dict(state)
        assert optimizer.round == 3 and str(optimizer.state_dict()) == before


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rho": 0.0}, "rho"),
        ({"discount": 1.0}, "discount"),
        ({"rounds": 0}, "rounds"),
        ({"seed": "1"}, "seed"),
        ({"independent": True}, "one slice a process"),
        ({"gradient_bound": -1.0}, "gradient_bound"),
        ({"params": []}, "empty parameter list"),
        ({"params": [torch.zeros(3)]}, "params"),
        ({"params": [torch.zeros(2, 2).bfloat16()]}, "params"),
        ({"params": ["w"]}, "Tensor"),
        ({"params": [{"params": [torch.zeros(1, 2)]}] * 2}, "one process"),
        ({"params": [torch.zeros(2, 3), torch.zeros(2, 3).double()]}, "share dtype"),
        ({"learner": lambda shape, **k: FAML(shape, dtype=F64)}, "pass its keywords on"),
        ({"learner": "faml"}, "got 'faml'; pass the class"),
        ({"learner": FAML((2, 3))}, "pass the class"),
        ({"learner": AdaGradOGD, "params": parameters([(1, 4)])}, "operator-norm ball"),
    ],
)
def test_bad_arguments_are_named(change, word):
    options = {"params": parameters([(2, 3)]), "learner": FAML, "rho": RHO, "discount": GAMMA}
    with pytest.raises((ValueError, TypeError), match=word):
        O2NC(**{**options, "rounds": 5, **change})


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 1, 4)])
def test_vector_learners_of_the_euclidean_ball_play(shape):
    for learner, options in ((AdaGradOGD, {"ball": "l2"}), (GaussianFTPL, {})):
        (param,) = parameters([shape])
        optimizer = O2NC([param], learner, rho=RHO, discount=GAMMA, rounds=5, **options)
        param.grad = torch.full_like(param, 0.25)
        optimizer.step()
        # In the ball; a learner without noise plays against the gradient.
        (action,) = optimizer.actions
        lengths = action.flatten(-2).norm(dim=-1)
        assert (lengths > 0).all() and (lengths <= optimizer.radius * (1 + 1e-12)).all()
        assert (action < 0).all() or learner is GaussianFTPL


@pytest.mark.parametrize("make", [OneSidedShampoo, Shampoo, functools.partial(OneSidedShampoo)])
def test_a_learner_of_the_plain_game_is_fed_the_papers_reduction(make):
    """ℓ_t(X) = γ^{-t}⟨G_t, X⟩, played by hand beside the process."""
    (param,) = parameters([(3, 4)])
    optimizer = O2NC([param], make, rho=RHO, discount=GAMMA, rounds=20)
    by_hand = make((3, 4), radius=optimizer.radius, dtype=param.dtype)
    for t in range(1, 7):
        assert torch.equal(optimizer.actions[0], by_hand.play())
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(t)).to(param.dtype)
        param.grad = gradient.clone()
        optimizer.step()
        by_hand.observe(gradient * GAMMA**-t)
    assert optimizer.actions[0].any()


def test_a_reduction_that_overflows_is_refused_and_changes_nothing():
    param = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = O2NC([param], OneSidedShampoo, rho=RHO, discount=1e-9, rounds=20)
    before = None
    with pytest.raises(OverflowError, match="round 3"):
        for _ in range(4):
            before = param.detach().clone()
            param.grad = torch.ones(2, 3)
            optimizer.step()
    assert optimizer.round == 2 and torch.equal(param, before)
    assert optimizer.average[0].dtype == F64  # also of float32 weights


def test_seed_and_stream_reach_the_factory_unless_it_has_its_own():
    def noises(learner):
        optimizer = make(parameters([(2, 3)] * 2), learner)
        return [(x.potential.seed, x.stream) for x in optimizer.learners]

    usual = noises(FTPL)
    assert usual[0] == (3, 0) and usual[1][1] > 0
    assert noises(lambda shape, **k: FTPL(shape, **k)) == usual
    seeded = functools.partial(functools.partial(FTPL, samples=2), seed=7)
    assert noises(seeded) == [(7, stream) for _, stream in usual]
    assert noises(functools.partial(FTPL, stream=5)) == [(3, 5), (3, 5)]
    assert noises(functools.partial(lambda shape, **k: FTPL(shape, **k), seed=7))[0] == (7, 0)


@pytest.mark.parametrize("kind", ["gradient", "none", "too large", "action fails"])
def test_a_round_that_fails_changes_nothing(kind):
    shapes = [(2, 3), (3, 3)]
    params = parameters(shapes)
    streams = [gradients(s, 12, i) for i, s in enumerate(shapes)]
    optimizer = make(params)
    run(optimizer, params, streams, 0, 2)
    before, weights = optimizer.state_dict(), [p.detach().clone() for p in params]
    params[0].grad, params[1].grad = streams[0][2], streams[1][2]
    second = optimizer.learners[1]
    act = second.action
    if kind == "gradient":
        params[1].grad = torch.full((3, 3), math.nan, dtype=F64)
    elif kind == "none":
        params[1].grad = None
    elif kind == "too large":
        params[1].grad = 100 * torch.eye(3, dtype=F64)
    else:
        second.action = lambda: (_ for _ in ()).throw(RuntimeError("no convergence"))
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    second.action, after = act, optimizer.state_dict()
    assert optimizer.round == 2 and str(after) == str(before)  # to four digits, all of it
    assert all(after[k].equal(before[k]) for k in before if k.startswith(("average", "output")))
    assert all(map(torch.equal, params, weights))
    run(optimizer, params, streams, 2)
    clean = parameters(shapes)
    run(make(clean), clean, streams)
    assert all(map(torch.equal, params, clean))
    with pytest.raises(RuntimeError, match="12 rounds are over"):
        optimizer.step()


# ---------------------------------------------------------------------- Proposition G.1's terms


@pytest.mark.parametrize("independent", [False, True])
def test_the_terms_are_those_of_the_proposition(independent):
    """Against the oracle over the whole stored run, as one block-diagonal matrix per process."""
    rounds, shapes = 300, [(4, 2, 3), (4, 3, 2)] if independent else [(2, 3), (2, 3, 2)]
    params = parameters(shapes)
    truths = [gradients(s, rounds, 7 + i) for i, s in enumerate(shapes)]
    noises = [gradients(s, rounds, 70 + i) for i, s in enumerate(shapes)]
    optimizer = make(params, rounds=rounds, independent=independent, gradient_bound=9.0)
    meter, history = ConversionMeter(optimizer, points=30), []

    def whole(tensors):  # (b, m, n) of b processes
        blocks = [x if independent else x[None] for x in tensors]
        if not independent:
            blocks = [blocks[0], *blocks[1].unbind(1)]
        return torch.stack([torch.block_diag(*parts) for parts in zip(*blocks, strict=True)])

    for t in range(rounds):
        for param, truth, noisy in zip(params, truths, noises, strict=True):
            param.grad = truth[t] + noisy[t]
        now = [truth[t] for truth in truths]
        history.append([whole(x) for x in (now, [p.grad for p in params], optimizer.actions)])
        meter.record(now)
        optimizer.step()
    true, fed, played = (torch.stack(x).numpy() for x in zip(*history, strict=True))
    terms, fall = meter.terms(2.0), np.full(len(true[0]), 2.0)
    game = {"rho": RHO, "discount": GAMMA, "fall": fall}
    left, right = conversion_oracle.proposition(true, fed, played, **game)
    np.testing.assert_allclose(terms.gap.reshape(-1), left, rtol=1e-12)
    np.testing.assert_allclose(terms.bound.reshape(-1), right, rtol=1e-12)
    # Without noise and fall the regrets are left, and the loss gap alone is the descent.
    noise = conversion_oracle.proposition(true, fed, 0 * played, **{**game, "fall": 0 * fall})[1]
    clean = conversion_oracle.proposition(fed, fed, 0 * played, **{**game, "fall": 0 * fall})[1]
    np.testing.assert_allclose(terms.noise.reshape(-1), noise - clean, rtol=1e-12)
    np.testing.assert_allclose(terms.descent.reshape(-1), 2 / (optimizer.radius * rounds))
    gaps = [nuclear(conversion_oracle.average(true[: t + 1], GAMMA)) for t in range(rounds)]
    for t, gap in meter.curve:
        np.testing.assert_allclose(gap.reshape(-1), gaps[t - 1], rtol=1e-12)
    assert 30 <= len(meter.curve) <= 31


def test_several_matrices_keep_the_proposition_with_one_length_and_time():
    """100 runs of 2×3, 1×4 and 1×1 on kinks that couple them: left ≤ right, each block ≤ its bound.

    The mean of left − right over runs is at most 0; three of its standard errors are allowed.
    """
    runs, rounds, shapes = 100, 150, [(2, 3), (1, 4), (1, 1)]
    slopes = [gradients((6, *shape), 1, 90 + i)[0] for i, shape in enumerate(shapes)]
    params = [torch.nn.Parameter(torch.full((runs, *s), 0.3, dtype=F64)) for s in shapes]
    optimizer = make(params, rounds=rounds, independent=True, gradient_bound=20.0)
    meter = ConversionMeter(optimizer)

    def values():
        pairs = zip(slopes, params, strict=True)
        return sum(torch.einsum("kmn,bmn->bk", slope, w.detach()) for slope, w in pairs)

    first = values().abs().sum(1)
    for t in range(rounds):
        truth = [torch.einsum("bk,kmn->bmn", values().sign(), slope) for slope in slopes]
        noises = [gradients(g.shape, 1, 1000 + 3 * t + i)[0] for i, g in enumerate(truth)]
        for param, slope, noisy in zip(params, truth, noises, strict=True):
            param.grad = slope + noisy
        meter.record(truth)
        optimizer.step()
    for learner in optimizer.learners:
        assert learner.certificate().holds
    terms = meter.terms(first[0].item())  # inf L = 0, and all runs begin alike
    over = terms.gap - terms.bound
    assert over.mean() + 3 * over.std() / runs**0.5 <= 0
    assert terms.gap.mean() > 0.2 * terms.bound.mean()  # not by a wide margin


def test_the_meter_wants_every_round():
    params = parameters([(2, 2)])
    optimizer = make(params, rounds=3)
    meter = ConversionMeter(optimizer)
    params[0].grad = torch.zeros(2, 2, dtype=F64)
    optimizer.step()
    with pytest.raises(RuntimeError, match="before each step"):
        meter.record([params[0].grad])
    with pytest.raises(RuntimeError, match="all 3 rounds"):
        meter.terms(1.0)


def test_the_meter_holds_a_block_of_bytes(monkeypatch):
    """A budget below one round flushes every round; the terms are the same."""
    stream, bounds = gradients((2, 3), 12), []
    for budget, block in ((1, 1), (3 * 6 * 8 * 5, 5), (2**24, 12)):
        monkeypatch.setattr(conversion, "_BLOCK_BYTES", budget)
        params = parameters([(2, 3)])
        optimizer = make(params)
        meter, most = ConversionMeter(optimizer), 0
        for gradient in stream:
            params[0].grad = gradient
            meter.record([gradient / 2])
            most = max(most, len(meter._pending))
            optimizer.step()
        assert most == block - 1
        bounds.append(meter.terms(1.0).bound.item())
    assert bounds == pytest.approx([bounds[0]] * 3, rel=1e-13)
