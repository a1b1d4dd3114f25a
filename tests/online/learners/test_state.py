"""Saved states, and input that must leave the state as it is."""

import pytest
import torch

from helpers import LEARNERS, rounds_of
from nucleon.online import streams
from nucleon.online.learners import FAML, FTPL, FTRL
from nucleon.online.regret import Ledger

F64 = torch.float64


def same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, dict):
            same(value, b[name])
            continue
        equal = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert equal, name


def played(name, shape=(3, 5), rounds=6, **options):
    learner = LEARNERS[name](shape, discount=0.9, dtype=F64, **options)
    for _ in rounds_of(learner, streams.gaussian(shape, dtype=F64), rounds):
        pass
    return learner


# ---- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mid_round", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", LEARNERS)
def test_a_resumed_game_repeats_bit_for_bit(name, shape, mid_round, tmp_path):
    stream = streams.gaussian(shape, dtype=F64)
    learner = played(name, shape, gradient_bound=None)
    if mid_round:
        learner.play()
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    resumed = LEARNERS[name](shape, discount=0.9, gradient_bound=None, dtype=F64)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    pairs = zip(rounds_of(learner, stream, 6), rounds_of(resumed, stream, 6), strict=True)
    for (_, action), (_, again) in pairs:
        assert torch.equal(action, again)
    same(learner.state_dict(), resumed.state_dict())
    assert torch.equal(learner.bound(), resumed.bound())


@pytest.mark.parametrize("name", LEARNERS)
def test_an_action_that_waits_for_its_gradient_is_saved(name):
    learner = played(name)
    action = learner.play()
    resumed = LEARNERS[name]((3, 5), discount=0.9, dtype=F64)
    resumed.load_state_dict(learner.state_dict())
    resumed.observe(torch.zeros(3, 5, dtype=F64))  # no play() in between
    resumed.load_state_dict(learner.state_dict())
    assert torch.equal(resumed.play(), action)


def test_a_state_is_a_copy():
    learner = played("faml")
    state = learner.state_dict()
    before = learner.play()
    state["total"].zero_()
    assert torch.equal(learner.play(), before)
    other = FAML((3, 5), discount=0.9, dtype=F64)
    kept = learner.state_dict()
    other.load_state_dict(kept)
    kept["gram"].zero_()
    assert torch.equal(other.play(), before)


def test_playing_twice_is_playing_once():
    learner = played("ftpl")
    first = learner.play()
    first.zero_()  # the caller's copy
    second = learner.play()
    assert second.any() and torch.equal(second, learner.play())


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: played("ftrl"), "learner"),
        (lambda: played("faml", (5, 3)), "shape"),
        (lambda: played("faml", radius=2.0), "radius"),
        (lambda: played("faml", eta=2.0), "eta"),
        (lambda: played("faml", gradient_bound=2.0), "gradient_bound"),
        (lambda: played("faml", method="coupled"), "method"),
        (lambda: played("faml", on_excess="clip"), "on_excess"),
    ],
)
def test_a_state_of_another_learner_shape_or_options_is_refused(other, match):
    learner = played("faml")
    before = learner.state_dict()
    with pytest.raises(ValueError, match=match):
        learner.load_state_dict(other().state_dict())
    same(before, learner.state_dict())


def test_ftpl_refuses_other_noise():
    state = FTPL((2, 3), seed=1).state_dict()
    for options in ({"seed": 2}, {"seed": 1, "samples": 8}, {"seed": 1, "stream": 3}):
        with pytest.raises(ValueError, match=f"the state has {[*options][-1]}="):
            FTPL((2, 3), **options).load_state_dict(state)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("gram"),
        lambda s: s.update(gram=s["gram"][:2]),
        lambda s: s.update(gram=s["gram"].float()),
        lambda s: s["ledger"].update(rounds=6),
        lambda s: s["ledger"].pop("rounds"),
        lambda s: s.update(action=torch.zeros(2, 2)),
        lambda s: s.update(start=None),
        lambda s: s.update(other=torch.zeros(3)),
        lambda s: s.pop("facts"),
        lambda s: s["total"].fill_(torch.nan),
        lambda s: s["gram"].fill_(torch.inf),
        lambda s: s.update(action=torch.full((3, 5), torch.nan, dtype=F64)),
    ],
)
def test_a_damaged_state_is_refused(damage):
    learner = played("ftrl")
    before = learner.state_dict()
    state = learner.state_dict()
    damage(state)
    with pytest.raises((ValueError, TypeError)):
        learner.load_state_dict(state)
    same(before, learner.state_dict())


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="state_dict"):
        played("faml").load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict"):
        Ledger((2, 3)).load_state_dict(state)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "error", "match"),
    [
        (torch.zeros(5, 3, dtype=F64), ValueError, "shape"),
        (torch.zeros(1, 3, 5, dtype=F64), ValueError, "shape"),
        (torch.zeros(5, dtype=F64), ValueError, "dimensions"),
        (torch.zeros(3, 5, dtype=torch.float32), TypeError, "dtype"),
        (torch.zeros(3, 5, dtype=torch.int64), TypeError, "floating"),
        (torch.zeros(3, 5, dtype=torch.complex128), TypeError, "real"),
        (torch.full((3, 5), float("nan"), dtype=F64), ValueError, "finite"),
        (torch.full((3, 5), float("inf"), dtype=F64), ValueError, "finite"),
        (torch.zeros(3, 5, dtype=F64).to_sparse(), TypeError, "dense"),
        ([[0.0] * 5] * 3, TypeError, "Tensor"),
        (None, TypeError, "Tensor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", LEARNERS)
def test_a_bad_gradient_leaves_the_state_untouched(name, gradient, error, match):
    learner = played(name)
    learner.play()
    before = learner.state_dict()
    with pytest.raises(error, match=match):
        learner.observe(gradient)
    same(before, learner.state_dict())


def test_a_gradient_on_another_device_is_refused():
    learner = played("faml")
    learner.play()
    before = learner.state_dict()
    with pytest.raises(ValueError, match="meta"):
        learner.observe(torch.zeros(3, 5, dtype=F64, device="meta"))
    same(before, learner.state_dict())


@pytest.mark.parametrize("on_excess", ["clip", "grow"])
def test_a_gradient_whose_gram_overflows_is_refused(on_excess):
    learner = FAML((2, 3), gradient_bound=None, on_excess=on_excess, dtype=F64)
    learner.play()
    before = learner.state_dict()
    with pytest.raises(ValueError, match="Gram"):
        learner.observe(torch.full((2, 3), 1e200, dtype=F64))
    same(before, learner.state_dict())


def test_a_gradient_answers_an_action():
    learner = FAML((2, 3), dtype=F64)
    gradient = torch.full((2, 3), 0.1, dtype=F64)
    with pytest.raises(RuntimeError, match=r"call play\(\) first"):
        learner.observe(gradient)
    learner.play()
    learner.observe(gradient)
    with pytest.raises(RuntimeError, match="play"):
        learner.observe(gradient)
    assert learner.rounds == 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (5,), (2, 3, 5), (5, 3)], ids=str)
def test_trust_does_not_broadcast(shape):
    learner = FAML((3, 5), validate=False, dtype=F64)
    learner.play()
    before = learner.state_dict()
    with pytest.raises(ValueError, match="shape"):
        learner.observe(torch.zeros(shape, dtype=F64))
    same(before, learner.state_dict())


def test_the_gradient_of_a_loss_is_taken_without_its_graph():
    learner = FTRL((2, 3), dtype=F64)
    weight = torch.ones(2, 3, dtype=F64, requires_grad=True)
    learner.play()
    learner.observe(0.1 * weight)
    assert not learner.play().requires_grad and not learner.total.requires_grad
