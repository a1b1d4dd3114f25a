"""Launches, captures and replays, and their streams; no GPU is needed."""

from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import nucleon
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import engine, replay
from nucleon.optim.engines.cuda.replay import Lanes
from nucleon.optim.engines.work import Matrices
from nucleon.optim.matrices import stacks


def stack_of(*shape, device="cuda:0"):
    """Work on a stack of one parameter, which has a device but no memory."""
    with FakeTensorMode():
        param = torch.empty(shape, device=device)
    (stack,) = stacks.build([(param, None)], lambda *_: 2**62)
    return Matrices(engine, 0, stack.params, [{}], None, stack)


def small(count):
    return [stack_of(3, 64, 80) for _ in range(count)]


LARGE = stack_of(2048, 2048)


class Stream:
    """A name that writes down for whom it waits."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))


@pytest.fixture
def device(monkeypatch):
    """Streams that log, and `run`, which logs the stream that a launch would be on."""
    log, inside = [], []
    callers = cache(lambda device: Stream(f"caller {device.index}", log))

    def current(device):
        return inside[-1] if inside else callers(device)

    @contextmanager
    def entered(stream):
        inside.append(stream)
        try:
            yield
        finally:
            inside.pop()

    @cache
    def streams(device):
        return [Stream(f"lane {device.index}.{i}", log) for i in range(replay.LANES)]

    monkeypatch.setattr(replay, "_streams", streams)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "stream", entered)

    def run(given):
        """A step of these stacks; the streams they were on."""
        found, shared = [], Lanes(given)
        for stack in given:
            with shared.entered(stack):
                found.append(current(stack.params[0].device).name)
                log.append((found[-1], "runs", id(stack)))
        shared.join()
        return found

    return SimpleNamespace(log=log, run=run)


def waits(log):
    return [event for event in log if event[1] == "waits for"]


def test_lanes_begin_after_the_caller_and_the_caller_goes_on_after_all_of_them(device):
    used = device.run(small(20))
    assert set(used) == {f"lane 0.{i}" for i in range(replay.LANES)}
    assert len(waits(device.log)) == 2 * replay.LANES  # no lane for another, each once
    for name in set(used):
        runs = [i for i, event in enumerate(device.log) if event[:2] == (name, "runs")]
        assert device.log.index((name, "waits for", "caller 0")) < runs[0]
        assert device.log.index(("caller 0", "waits for", name)) > runs[-1]


def test_lanes_that_are_not_used_are_not_waited_for(device):
    assert device.run([*small(1), LARGE]) == ["lane 0.0", "caller 0"]
    assert waits(device.log) == [
        ("lane 0.0", "waits for", "caller 0"),
        ("caller 0", "waits for", "lane 0.0"),
    ]


def test_lanes_are_joined_though_a_stack_fails(monkeypatch):
    """By the step, and none is waited for twice."""
    joined, optimizer = [], nucleon.Muon([torch.zeros(4, 6, requires_grad=True)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 6)
    optimizer.step()
    monkeypatch.setattr(Lanes, "join", lambda shared: joined.append(shared.used))
    monkeypatch.setattr(reference, "step", lambda work, settings: 1 / 0)
    optimizer._worklist.lanes.used = {"a stream": "the caller's"}
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert joined == [{"a stream": "the caller's"}]


def test_a_list_of_stacks_has_the_same_lanes_at_every_step(device):
    given = [*small(7), LARGE, *small(13)]
    first = device.run(given)
    assert device.run(given) == device.run(given) == first
    assert first.pop(7) == "caller 0"
    assert first == [f"lane 0.{i % replay.LANES}" for i in range(20)]


def test_each_device_has_lanes_and_a_caller_of_its_own(device):
    assert device.run([*small(1), stack_of(64, 64, device="cuda:1")]) == ["lane 0.0", "lane 1.1"]
    assert waits(device.log)[1::2] == [
        ("lane 1.1", "waits for", "caller 1"),
        ("caller 1", "waits for", "lane 1.1"),
    ]


@pytest.mark.parametrize(
    ("shape", "small"),
    [
        ((64, 128, 4096), True),  # 64 tiles, one for each matrix
        ((65, 128, 4096), False),
        ((64, 4096, 128), True),  # the short side counts
        ((21, 129, 256), True),  # three tiles each
        ((22, 129, 256), False),
        ((1280, 1280), True),  # a triangle of 55
        ((1281, 1281), False),  # of 66
    ],
)
def test_small_is_what_has_few_tiles(shape, small, device):
    found = device.run([stack_of(*shape)])
    assert found == ["lane 0.0" if small else "caller 0"]
    assert bool(device.log[1:]) is small  # alone, nothing waits


def test_the_matrices_of_all_pieces_are_counted():
    with FakeTensorMode():
        params = [torch.empty(64, 64, device="cuda:0") for _ in range(65)]
    for some in (64, 65):
        (stack,) = stacks.build([(p, None) for p in params[:some]], lambda *_: 2**62)
        assert replay._small(stack) is (some == 64)


def test_matrices_of_other_ranks_stay_with_the_caller(device, monkeypatch):
    """They are gathered in an order."""
    others = small(1)
    monkeypatch.setattr(replay.shards, "sharded", lambda tensor: True)
    assert device.run(others) == ["caller 0"]
    assert waits(device.log) == []


def replayed(monkeypatch, fails=False):
    """A replay and its log: what was launched or captured, for which arguments, or replayed."""
    log, shared = [], replay.Replay()

    def captured(launch, pools, device):
        launch()
        log.append("captured")
        graph = SimpleNamespace(replay=lambda: log.append("replayed"))
        return None if fails else graph

    def run(arguments, pools, device="cuda"):
        shared.run(arguments, lambda: log.append(arguments), pools, torch.device(device))

    monkeypatch.setattr(replay, "_captured", captured)
    return log, run


def test_launches_are_captured_when_they_come_again_and_anew_for_others(monkeypatch):
    log, run = replayed(monkeypatch)
    for arguments in ("a", "a", "a", "b", "b", "a"):
        run(arguments, {})
    again = ["captured", "replayed"]
    assert log == ["a", "a", *again, "replayed", "b", "b", *again, "a"]


def test_launches_are_done_where_nothing_is_captured(monkeypatch):
    """Since it would not pay, on a CPU, or since it fails: that is tried once."""
    log, run = replayed(monkeypatch, fails=True)
    for pools, device in ((None, "cuda"), (None, "cuda"), ({}, "cpu"), ({}, "cuda"), ({}, "cuda")):
        run("a", pools, device)
    assert log == ["a", "a", "a", "a", "captured", "a", "a"]


def test_an_input_is_written_when_its_value_changes():
    rates = replay.Input(torch.zeros(2))
    rates.fill(0.5, 0.25)
    rates.tensor[0] = 7.0  # to see whether it is written to
    rates.fill(0.5, 0.25)
    assert rates.tensor.tolist() == [7.0, 0.25]
    rates.fill(0.5, torch.tensor(0.125))  # which may change where it lies
    assert rates.tensor.tolist() == [0.5, 0.125]
    rates.fill(0.5, torch.tensor(0.75))
    assert rates.tensor.tolist() == [0.5, 0.75]
    rates.fill(0.5, 0.75)
    rates.fill(1.0, 0.75)
    assert rates.tensor.tolist() == [1.0, 0.75] and rates.known == (1.0, 0.75)
