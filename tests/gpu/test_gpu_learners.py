"""Learners, streams and ledgers on CUDA: the games of the CPU, resumed and decomposed."""

import pytest
import torch

from nucleon.online import streams
from nucleon.online.game import play
from nucleon.online.learners import FAML, FTPL, LEARNERS
from nucleon.online.regret import decompose

F64 = torch.float64
ROUNDS = 12
VECTORS = {"adagrad-ogd", "adagrad-ftrl", "gaussian-ftpl"}
STREAMS = {name: make for name, make in streams.STREAMS.items() if name not in ("replay", "worst")}


def shape_of(name):
    return (1, 6) if name in VECTORS else (4, 6)


def game(name, device, dtype=F64, **options):
    shape = shape_of(name)
    learner = LEARNERS[name](shape, dtype=dtype, device=device, **options)
    stream = streams.gaussian(shape, bound=0.9, dtype=dtype, device=device)
    actions = []
    for t in range(1, ROUNDS + 1):
        action = learner.play()
        gradient = stream.gradient(t, action)
        learner.observe(gradient, oblivious=True)
        actions.append(action)
    return learner, learner.ledger, torch.stack(actions)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("name", LEARNERS)
def test_a_game_on_cuda_is_the_game_on_the_cpu(name, dtype):
    learner, ledger, actions = game(name, "cuda", dtype)
    other, host, expected = game(name, "cpu", dtype)
    assert actions.is_cuda and ledger.regret().is_cuda and learner.bound().is_cuda
    # A solver that stops at a relative gap of 1e-8 may stop at another iterate, √(2·1e-8) away;
    # the others differ by rounding, the gradients' first of all.
    solved = any(word in name for word in ("ftrl", "shampoo", "adagrad"))
    close = 1e-3 if solved else 1e3 * torch.finfo(dtype).eps
    assert torch.dist(actions.cpu(), expected) <= close
    assert abs(ledger.regret().cpu() - host.regret()) <= ROUNDS * close
    torch.testing.assert_close(learner.bound().cpu(), other.bound(), rtol=1e-4, atol=0)
    certificate = learner.certificate()
    assert certificate.holds == other.certificate().holds


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 4, 6)], ids=str)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_on_cuda_is_the_stream_on_the_cpu(name, shape, dtype):
    here = STREAMS[name](shape, dtype=dtype, device="cuda", seed=3)
    there = STREAMS[name](shape, dtype=dtype, device="cpu", seed=3)
    for t in (1, 2, 1000):
        # Singular vectors have signs of their own: an isometry as action determines the answer.
        action = torch.eye(*shape[-2:], dtype=dtype).expand(shape) if name == "adversary" else None
        gradient = here.gradient(t, None if action is None else action.cuda())
        assert gradient.is_cuda and gradient.dtype == dtype
        # The noise differs in the last places, products and norms by roundings of 6 terms.
        expected = there.gradient(t, action)
        assert torch.dist(gradient.cpu(), expected) <= 100 * torch.finfo(dtype).eps


def test_a_recording_is_replayed_on_cuda(tmp_path):
    recording = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.save(recording, tmp_path / "recording.pt")
    stream = streams.replay(tmp_path / "recording.pt", device="cuda")
    for t in range(1, 6):
        assert torch.equal(stream.gradient(t).cpu(), recording[t - 1])


@pytest.mark.parametrize("name", LEARNERS)
def test_a_game_is_resumed_on_cuda(name, tmp_path):
    learner, *_ = game(name, "cuda")
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True)
    resumed = LEARNERS[name](shape_of(name), dtype=F64, device="cuda")
    resumed.load_state_dict(state)  # from the CPU onto the device
    stream = streams.gaussian(shape_of(name), bound=0.9, dtype=F64, device="cuda")
    first = play(learner, stream, 8, record=1)
    second = play(resumed, stream, 8, record=1)
    assert torch.equal(first.regret, second.regret) and torch.equal(first.bound, second.bound)
    assert not first.regret.is_cuda


def test_gradients_of_another_device_are_refused():
    learner = FAML((2, 3), dtype=F64, device="cuda")
    learner.play()
    with pytest.raises(ValueError, match="cuda:0"):
        learner.observe(torch.zeros(2, 3, dtype=F64))
    assert learner.rounds == 0


@pytest.mark.parametrize("name", ["ftl", "ftrl", "ftpl", "faml"])
def test_a_game_on_cuda_is_decomposed_there(name):
    fixed = {"redraw": False, "stream": 3} if name == "ftpl" else {}
    learner, _, actions = game(name, "cuda", **fixed)
    stream = streams.gaussian((4, 6), bound=0.9, dtype=F64, device="cuda")
    gradients = torch.stack([stream.gradient(t) for t in range(1, ROUNDS + 1)])
    noise = {"stream": 3} if name == "ftpl" else {}
    terms = decompose(learner.potential, gradients, actions, **noise)
    assert terms.regret.is_cuda and terms.gap.is_cuda
    assert terms.mismatch.abs() <= (1e-2 if name == "ftrl" else 1e-10)


def test_games_of_a_batch_have_their_own_noise_and_bounds():
    bounds = torch.tensor([1.0, 2.0])  # on the CPU: it moves to the learner's device
    learner = FTPL((2, 4, 6), gradient_bound=bounds, dtype=F64, device="cuda")
    assert learner.level.is_cuda
    stream = streams.gaussian((2, 4, 6), dtype=F64, device="cuda")
    trace = play(learner, stream, 5)
    assert trace.certificate.holds and trace.regret.shape == (5, 2)
