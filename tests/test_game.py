"""Games played to traces, and traces kept in files."""

import gc
import json
from pathlib import Path

import pytest
import torch

from helpers import LEARNERS, STREAMS, ledger_of
from nucleon import streams
from nucleon.game import Trace, play
from nucleon.learners import FAML, FTL, FTPL
from nucleon.regret import Ledger

F64 = torch.float64


def gaussian(shape=(3, 5), **options):
    return streams.gaussian(shape, dtype=F64, **options)


def same(a: Trace, b: Trace):
    first, second = a.to_dict(), b.to_dict()
    assert first == second
    for name in ("regret", "bound", "norm"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


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
        certificate = learner.certificate(ledger, oblivious=source.oblivious)
    assert (trace.norm <= 1 + 1e-9).all() and trace.norm.shape == trace.regret.shape
    assert trace.certificate.holds == certificate.holds
    assert trace.refusal == certificate.refusal
    assert trace.conditional_on == certificate.conditional_on
    assert torch.equal(trace.certificate.slack, certificate.slack)


def test_ftpl_against_an_adaptive_stream_is_not_certified():
    trace = play(FTPL((3, 5), dtype=F64), streams.adversary((3, 5), dtype=F64), 10)
    assert not trace.certificate.holds and "fixed before" in str(trace.certificate)
    assert play(FTPL((3, 5), dtype=F64), gaussian(), 10).certificate.holds


def test_log_spaced_rounds():
    trace = play(FAML((1, 1), dtype=F64), gaussian((1, 1)), 1000)
    assert trace.rounds[:4] == (1, 2, 3, 4) and {10, 100, 1000} <= set(trace.rounds)
    gaps = [b / a for a, b in zip(trace.rounds, trace.rounds[1:], strict=False) if a >= 20]
    assert len(trace.rounds) <= 61 and max(gaps) <= 1.2
    assert play(FAML((1, 1), dtype=F64), gaussian((1, 1)), 137).rounds[-1] == 137


def test_memory_does_not_grow_with_the_rounds():
    counts = []

    class Counting:
        """A stream of another kind: anything with these members can be played."""

        name, shape, gradient_bound, oblivious, rounds = "counting", (3, 5), 1.0, True, None
        source = gaussian()

        def gradient(self, t, action=None):
            if t in (100, 400):
                gc.collect()
                counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
            return self.source.gradient(t)

    trace = play(FAML((3, 5), dtype=F64), Counting(), 401)
    kept = sum(100 <= t < 400 for t in trace.rounds)  # three tensors each, and nothing else
    assert counts[1] - counts[0] == 3 * kept


def test_a_game_goes_on_with_its_ledger():
    whole = play(FTPL((3, 5), dtype=F64), gaussian(), 20, record=5)
    learner, ledger = FTPL((3, 5), dtype=F64), Ledger((3, 5))
    play(learner, gaussian(), 10, record=5, ledger=ledger)
    rest = play(learner, gaussian(), 10, record=5, ledger=ledger)
    assert rest.rounds == (15, 20) and torch.equal(rest.regret, whole.regret[2:])
    with pytest.raises(ValueError, match="ledger"):
        play(learner, gaussian(), 1)
    with pytest.raises(ValueError, match="another game"):
        play(learner, gaussian(), 1, ledger=Ledger((3, 5)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: play(FAML((3, 5), dtype=F64), gaussian((5, 3)), 2), "shape"),
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


# ---- files -------------------------------------------------------------------------------------


@pytest.fixture
def trace():
    return play(FAML((2, 3, 5), discount=0.9, dtype=F64), gaussian((2, 3, 5)), 30)


def test_a_saved_trace_comes_back(trace, tmp_path):
    path = tmp_path / "game.jsonl"
    trace.save(path)
    same(Trace.load(path), trace)
    assert Trace.load(path).certificate.holds
    assert [p.name for p in tmp_path.iterdir()] == ["game.jsonl"]
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no Infinity, no NaN


def test_an_infinite_bound_comes_back(tmp_path):
    trace = play(FTL((3, 5), dtype=F64), gaussian(), 5)
    trace.save(tmp_path / "ftl.jsonl")
    again = Trace.load(tmp_path / "ftl.jsonl")
    same(again, trace)
    assert again.bound.isinf().all() and not again.certificate.holds


def test_a_dictionary_comes_back(trace):
    same(Trace.from_dict(json.loads(json.dumps(trace.to_dict()))), trace)


def test_every_cut_is_noticed(trace, tmp_path):
    path = tmp_path / "game.jsonl"
    trace.save(path)
    text = path.read_text()
    for end in [*range(0, len(text) - 1, 97), len(text) - 2]:
        path.write_text(text[:end])
        with pytest.raises(ValueError, match=r"trace|cut off|altered"):
            Trace.load(path)


def test_every_alteration_is_noticed(trace, tmp_path):
    path = tmp_path / "game.jsonl"
    trace.save(path)
    lines = path.read_text().splitlines()
    row = json.loads(lines[3])
    row["regret"] = [0.0, 0.0]
    for altered in (
        [*lines[:3], json.dumps(row), *lines[4:]],
        [lines[0].replace("0.9", "0.8"), *lines[1:]],
        lines[:2] + lines[3:],
        [lines[0], lines[2], lines[1], *lines[3:]],
    ):
        path.write_text("\n".join(altered) + "\n")
        with pytest.raises(ValueError, match="cut off or was altered"):
            Trace.load(path)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n[2]\n", b"\xff\xfe\x00", b"hello\n"])
def test_another_file_is_refused(content, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other"):
        Trace.load(path)
    path.write_text('{"format": "nucleon-trace", "version": 99}\n{}\n')
    with pytest.raises(ValueError, match="99"):
        Trace.load(path)


def test_a_failed_save_leaves_the_old_file(trace, tmp_path, monkeypatch):
    path = tmp_path / "game.jsonl"
    trace.save(path)
    before = path.read_bytes()

    def fail(self, target):
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        play(FAML((3, 5), dtype=F64), gaussian(), 3).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["game.jsonl"]
