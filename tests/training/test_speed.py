"""What makes the loop fast: batches drawn ahead, a compiled model; and what measures it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from nucleon.cli.app import app
from nucleon.training import MLP, Nobody, Options, Recipe, begin, resume, train
from nucleon.training import clock as clock_module
from nucleon.training.clock import WARM, Clock
from nucleon.training.feed import ahead, feed
from nucleon.training.run import read_log

DIGITS = Options("digits", Recipe(5, log_every=1), batch=8, width=8, layers=1)
CPU = torch.device("cpu")


def batch(index):
    generator = torch.Generator().manual_seed(index)
    targets = torch.randint(10, (4,), generator=generator)
    return torch.randn(4, 64, generator=generator), targets


# ------------------------------------------------------------------ batches


def test_a_batch_is_drawn_while_the_one_before_is_used():
    drawn, threads, allowed = [], set(), threading.Semaphore(0)

    def draw(index):
        assert allowed.acquire(timeout=60)
        drawn.append(index)
        threads.add(threading.get_ident())
        return batch(index)

    with ThreadPoolExecutor(1) as worker:
        batches = ahead(draw, 3, 6, worker)
        for index in range(3, 6):
            allowed.release()
            inputs, targets = next(batches)
            assert torch.equal(inputs, batch(index)[0]) and torch.equal(targets, batch(index)[1])
            assert drawn[-1] == index  # the next is on its way and waits for its permission
        assert next(batches, None) is None
    assert drawn == [3, 4, 5] and threads.isdisjoint({threading.get_ident()})


def test_no_batch_is_drawn_of_none():
    with ThreadPoolExecutor(1) as worker:
        assert list(ahead(pytest.fail, 4, 4, worker)) == []


def test_an_error_in_drawing_reaches_the_loop():
    def draw(index):
        if index == 1:
            raise OSError("no such page")
        return batch(index)

    with ThreadPoolExecutor(1) as worker:
        batches = ahead(draw, 0, 3, worker)
        next(batches)
        with pytest.raises(OSError, match="no such page"):
            next(batches)


def test_off_cuda_a_batch_is_drawn_when_it_is_asked_for():
    drawn = []
    batches = feed(lambda i: drawn.append(i) or batch(i), 2, 5, CPU)
    assert drawn == []
    assert torch.equal(next(batches)[0], batch(2)[0])
    assert drawn == [2]


# ------------------------------------------------------------------ the optimizer's share


@pytest.fixture
def pass_time(monkeypatch):
    """A clock that stands still but for what is passed to the function."""
    now = [0.0]

    def more(seconds):
        now[0] += seconds

    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return more


def test_the_clock_tells_the_optimizer_from_the_rest(pass_time):
    model = MLP(width=4, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_pre_hook(lambda *_: pass_time(0.5))
    optimizer.register_step_pre_hook(lambda *_: pass_time(0.25))
    clock, watcher = Clock(CPU), Nobody()
    watcher.record = lambda _: pass_time(100.0)  # between two steps: of neither
    recipe = Recipe(WARM + 5, accumulate=3, log_every=2)
    train(model, optimizer, batch, recipe, watcher=watcher, clock=clock)
    assert clock.steps == WARM + 5
    assert (clock.own, clock.whole) == (5 * 250, 5 * 1750)
    assert clock.share == 0.25 / 1.75


def test_first_steps_are_not_counted(pass_time):
    clock = Clock(CPU)
    for _ in range(3 * WARM):
        clock.mark()
        pass_time(10)
    assert clock.share is None and clock.steps == WARM
    for seconds in (3, 1, 7):
        clock.mark()
        pass_time(seconds)
    assert clock.share == 1 / 4


def test_the_share_is_told_at_the_end(tmp_path):
    assert 0 < begin(DIGITS, tmp_path / "run").go().optimizer_share < 1
    command = ["train", "--steps", "5", "--output", str(tmp_path / "told")]
    done = CliRunner().invoke(app, command)
    assert "% of a step" in done.stdout, done.output


# ------------------------------------------------------------------ compiled models


def compiling(call):
    """A compiler that hands a model's call to `call` instead."""

    def compile(self):
        self._compiled_call_impl = lambda *args: call(self, *args)

    return compile


def test_a_compiled_model_is_the_one_that_is_trained(tmp_path, monkeypatch):
    calls = []

    def counted(model, x):
        calls.append(tuple(x.shape))
        return model._call_impl(x)

    plain = begin(DIGITS, tmp_path / "plain")
    assert not plain.compiled  # unless it is asked for, on a CPU
    plain.go()
    monkeypatch.setattr(nn.Module, "compile", compiling(counted))
    run = begin(DIGITS, tmp_path / "compiled", compiled=True, say=pytest.fail)
    assert run.compiled and calls == [(8, 64)]  # compiled before the first step
    assert all(p.grad is None for p in run.model.parameters())
    run.go()
    assert calls.count((8, 64)) > 5
    assert read_log(run.folder / "trace.jsonl") == read_log(plain.folder / "trace.jsonl")


def test_trying_the_compiler_draws_nothing_from_the_run(tmp_path, monkeypatch):
    """A model with dropout ends as it does without a compiler."""
    options = Options("text", Recipe(3, log_every=1), batch=2, megabytes=0.02, context=8, layers=1,
                      heads=2, width=8, dropout=0.5)  # fmt: skip
    plain = begin(options, tmp_path / "plain").go()
    monkeypatch.setattr(nn.Module, "compile", compiling(lambda model, x: model._call_impl(x)))
    begin(options, tmp_path / "run", compiled=True).go(stop=iter([False, True]).__next__)
    again = resume(tmp_path / "run", compiled=True)
    assert again.compiled and again.start == 1
    assert again.go().figures == plain.figures


def test_without_a_compiler_one_line_says_so_and_the_run_goes_on(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler is at hand\nand much more")

    monkeypatch.setattr(nn.Module, "compile", compiling(fail))
    said = []
    run = begin(DIGITS, tmp_path / "run", compiled=True, say=said.append)
    assert said == ["the model cannot be compiled (no compiler is at hand); it is trained as it is"]
    assert not run.compiled and run.go().finished
    command = ["train", "--steps", "1", "--compile", "--output", str(tmp_path / "said")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "cannot be compiled" in done.stderr


@pytest.mark.parametrize("flag", ["--compile", "--no-compile"])
def test_the_choice_is_in_the_commands_that_repeat_and_go_on(tmp_path, monkeypatch, flag):
    monkeypatch.setattr(nn.Module, "compile", compiling(lambda model, x: model._call_impl(x)))
    command = ["train", "--steps", "1", flag, "--output", str(tmp_path / "run")]
    assert CliRunner().invoke(app, command).exit_code == 0
    manifest = (tmp_path / "run" / "manifest.json").read_text()
    assert f"--steps 1 {flag}" in manifest
    assert f'"compiled": {"true" if flag == "--compile" else "false"}' in manifest
