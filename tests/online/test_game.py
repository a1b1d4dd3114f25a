"""Games played to traces."""

import gc
import json

import numpy as np
import pytest
import torch

from helpers import LEARNERS, STREAMS, ledger_of
from nucleon._files import to_json
from nucleon.online import streams
from nucleon.online.game import play
from nucleon.online.learners import FAML, FTL, FTPL, AdaGradOGD

F64 = torch.float64


def gaussian(shape=(3, 5), **options):
    return streams.gaussian(shape, dtype=F64, **options)


# ---- playing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", LEARNERS)
def test_a_trace_is_the_game_by_hand(name, stream, shape):
    source = STREAMS[stream](shape, dtype=F64)
    trace = play(LEARNERS[name](shape, dtype=F64), source, 7, record=3)
    assert trace.rounds == (3, 6, 7)
    assert (trace.learner, trace.stream, trace.oblivious) == (name, source.name, source.oblivious)
    for row, rounds in enumerate(trace.rounds):
        learner = LEARNERS[name](shape, dtype=F64)
        ledger = ledger_of(learner, source, rounds)
        assert torch.equal(trace.regret[row], ledger.regret())
        assert torch.equal(trace.bound[row], learner.bound())
        certificate = learner.certificate()
    assert (trace.norm <= 1 + 1e-9).all() and trace.norm.shape == trace.regret.shape
    assert trace.certificate.holds == certificate.holds
    assert trace.certificate.refusal == certificate.refusal
    assert torch.equal(trace.certificate.slack, certificate.slack)


def test_log_spaced_rounds():
    trace = play(FAML((1, 1), dtype=F64), gaussian((1, 1)), 1000)
    assert trace.rounds[:4] == (1, 2, 3, 4) and {10, 100, 1000} <= set(trace.rounds)
    gaps = [b / a for a, b in zip(trace.rounds, trace.rounds[1:], strict=False) if a >= 20]
    assert len(trace.rounds) <= 61 and max(gaps) <= 1.2
    assert play(FAML((1, 1), dtype=F64), gaussian((1, 1)), 137).rounds[-1] == 137


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (2, 1, 6)], ids=str)
@pytest.mark.parametrize("ball", ["l2", "linf"])
def test_norms_are_those_of_the_ball_that_is_played_in(ball, shape):
    learner, stream = AdaGradOGD(shape, ball=ball, dtype=F64), gaussian(shape)
    trace, by_hand = play(learner, stream, 60, record=1), AdaGradOGD(shape, ball=ball, dtype=F64)
    for t in trace.rounds:
        x = by_hand.play().numpy().reshape(*shape[:-2], 6)
        expected = np.linalg.norm(x, axis=-1) if ball == "l2" else np.abs(x).max(-1)
        np.testing.assert_allclose(trace.norm[t - 1].numpy(), expected, rtol=1e-12)
        by_hand.observe(stream.gradient(t))
    assert (trace.norm <= 1 + 1e-9).all() and trace.norm.max() > 0.5


def test_memory_does_not_grow_with_the_rounds():
    rounds, tensors, bytes_held = 400, [], []

    class Counting:
        """A stream of another kind: anything with these members can be played."""

        name, shape, gradient_bound, oblivious, rounds = "counting", (32, 64), 1.0, True, None
        source = streams.alternating((32, 64), dtype=F64)

        def gradient(self, t, action=None):
            if t in (100, rounds):
                gc.collect()
                alive = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
                tensors.append(len(alive))
                bytes_held.append(sum(o.numel() * o.element_size() for o in alive))
            return self.source.gradient(t)

    trace = play(FAML((32, 64), validate=False, dtype=F64), Counting(), rounds + 1)
    kept = sum(100 <= t < rounds for t in trace.rounds)  # three numbers each, and nothing else
    assert tensors[1] - tensors[0] == 3 * kept
    assert bytes_held[1] - bytes_held[0] == 3 * 8 * kept


def test_a_game_can_be_watched():
    rows = []
    trace = play(
        FAML((2, 3, 5), dtype=F64), gaussian((2, 3, 5)), 10, record=4, on_record=rows.append
    )
    assert tuple(row.round for row in rows) == trace.rounds == (4, 8, 10)
    for i, row in enumerate(rows):
        assert torch.equal(row.regret, trace.regret[i]) and torch.equal(row.bound, trace.bound[i])
        assert torch.equal(row.slack, trace.bound[i] - trace.regret[i])
        assert torch.equal(row.norm, trace.norm[i])


def test_a_game_goes_on():
    whole = play(FTPL((3, 5), dtype=F64), gaussian(), 20, record=5)
    learner = FTPL((3, 5), dtype=F64)
    play(learner, gaussian(), 10, record=5)
    rest = play(learner, gaussian(), 10, record=5)
    assert rest.rounds == (15, 20) and torch.equal(rest.regret, whole.regret[2:])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: play(FAML((3, 5), dtype=F64), gaussian((5, 3)), 2), "shape .* build both"),
        (lambda: play(FAML((3, 5), dtype=torch.float32), gaussian(), 2), "dtype"),
        (lambda: play(FAML((3, 5), dtype=F64), gaussian(), 0), "rounds"),
        (lambda: play(FAML((3, 5), dtype=F64), gaussian(), 2, record=0), "record"),
        (lambda: play(FAML((3, 5), dtype=F64), STREAMS["replay"]((3, 5)), 61), "end of the stream"),
        (lambda: play(FAML((3, 5), gradient_bound=1e-3, dtype=F64), gaussian(), 2), "on_excess"),
    ],
)
def test_games_that_cannot_be_played_are_refused(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call()


@pytest.mark.parametrize("make", [FAML, FTL])
def test_a_trace_becomes_plain_values(make):
    trace = play(make((2, 3, 5), discount=0.9, dtype=F64), gaussian((2, 3, 5)), 30)
    values = json.loads(to_json(trace.to_dict()))
    assert (values["learner"], values["shape"]) == (make.name, [2, 3, 5])
    assert values["rounds"] == [*trace.rounds] and values["norm"] == trace.norm.tolist()
    assert values["certificate"]["lower"] == trace.certificate.lower.tolist()
    assert (values["bound"] == trace.bound.tolist()) == (make is FAML)
    assert values["bound"][-1] == values["certificate"]["bound"]
    assert make is FAML or values["bound"][-1] == ["inf", "inf"]
