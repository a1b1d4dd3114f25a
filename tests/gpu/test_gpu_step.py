"""The fused step on a CUDA device: graphs, streams, memory; and whole models."""

import copy
import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import nucleon
from nucleon.optim.engines import reference
from nucleon.optim.engines.cuda import engine, program, replay
from nucleon.optim.engines.cuda.program import Launches

SHAPES = [(64, 200), (64, 200), (200, 72), (96, 96), (3, 64, 80), (130, 1030)]
CLASSES = [nucleon.Muon, nucleon.Leon, nucleon.Pion]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes]


def train(optimizer, params, steps, start=0):
    """New gradients each step, at other addresses."""
    held = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 2)
            p.grad = gradient.to(p)
            held.append(p.grad)  # and never freed
        optimizer.step()
    return params


def recordings(optimizer):
    made = optimizer._worklist
    caches = [work.cache for work in made.works] if made else []
    return [cache.recording for cache in caches if isinstance(cache, Launches)]


def graphs(optimizer):
    return [recording.replay.graph for recording in recordings(optimizer)]


def without_large(patch):
    patch.setattr(program, "LARGEST", 0)  # as of larger stacks


def without_capture(patch):
    patch.setattr(replay, "_captured", lambda *_: None)


def with_failing(patch):
    launch = engine.launch

    def failing(*args):
        launch(*args)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError

    patch.setattr(engine, "launch", failing)


@pytest.mark.parametrize("change", [without_large, without_capture, with_failing])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_replay_is_bit_for_bit_the_launches_it_replaces(cls, change, monkeypatch):
    """Also after an option has changed: all graphs are given up together, with their memory."""

    def trained():
        params = parameters()
        optimizer = cls(params, weight_decay=0.1)
        train(optimizer, params, 3)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(optimizer, params, 3, start=3)
        return params, graphs(optimizer)

    replayed, captured = trained()
    change(monkeypatch)
    launched, missing = trained()
    assert all(captured) and captured and missing and not any(missing)
    assert all(map(torch.equal, replayed, launched))


def test_schedules_loaded_states_and_missing_gradients_are_followed():
    """Three ways to break a graph that remembers too much; the torch path is not involved."""
    params, others = parameters(), parameters()
    one, two = nucleon.Leon(params, lr=0.1), nucleon.Leon(others, lr=0.1)
    for step in range(6):
        for optimizer, given in ((one, params), (two, others)):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            train_one(optimizer, given, step)
        if step == 3:  # new state tensors, at new addresses
            again = nucleon.Leon(others, lr=0.1)
            again.load_state_dict(two.state_dict())
            two = again
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)
    # What the device was told last.
    works = one._worklist.works
    assert len(works) == 5  # two of the six parameters share a stack
    for work, r in zip(works, recordings(one), strict=True):
        rows, columns = work.stack.shape
        expected = (0.1 / 6 * math.sqrt(max(1.0, rows / columns)), 0.0)
        assert r.rates.known == pytest.approx(expected)
        assert r.rates.tensor.tolist() == pytest.approx(expected)
        assert r.table.tensor.tolist() == r.table.known
        assert r.mask.tensor.all()


def train_one(optimizer, params, step):
    train(optimizer, params, 1, start=step)
    if step == 4:
        params[0].grad = None
        optimizer.step()


def test_a_copy_has_no_graphs_and_goes_on_by_itself():
    params = parameters()
    optimizer = nucleon.Leon(params, lr=0.1)
    train(optimizer, params, 3)
    other = copy.deepcopy(optimizer)
    assert not recordings(other)
    others = other.param_groups[0]["params"]
    train(optimizer, params, 3, start=3)
    train(other, others, 3, start=3)
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)


def test_a_state_left_on_the_host_is_an_error_that_can_be_caught():
    params = parameters(shapes=SHAPES[:1])
    optimizer = nucleon.Muon(params)
    train(optimizer, params, 3)
    optimizer.state[params[0]]["total"] = optimizer.state[params[0]]["total"].cpu()
    with pytest.raises(RuntimeError, match="device"):
        train(optimizer, params, 1)
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two devices")
def test_parameters_on_two_devices():
    params = parameters(shapes=SHAPES[:2])
    params[1] = params[1].detach().to("cuda:1").requires_grad_()
    others = parameters(shapes=SHAPES[:2])
    train(nucleon.Leon(params), params, 4)
    train(nucleon.Leon(others), others, 4)
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a.to(b.device), b, rtol=0.0, atol=0.01 * 4 * 0.02)


@pytest.mark.parametrize("cls", CLASSES)
def test_neither_capture_nor_replay_waits_for_the_device(cls):
    params = parameters()
    optimizer = cls(params, lr=0.1)
    train(optimizer, params, 1)  # compiles and tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(graphs(optimizer))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *((cls, {}) for cls in CLASSES),
        (nucleon.Pion, {"samples": 2}),
        (nucleon.Leon, {"step_length": "exponential"}),
    ],
)
def test_a_graph_of_the_user_holds_the_whole_step(cls, options):
    shapes = [*SHAPES, (24, 64), (64, 24), (1, 1)]
    eager, captured = parameters(shapes=shapes), parameters(shapes=shapes)
    one, two = cls(eager, lr=0.1, **options), cls(captured, lr=0.1, **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(two, captured, 3)
    torch.cuda.current_stream().wait_stream(side)
    train(one, eager, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two.step()
    for _ in range(3):
        one.step()
        graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


def test_the_memory_of_a_step_is_kept_and_does_not_grow():
    params = parameters()
    optimizer = nucleon.Leon(params)
    train(optimizer, params, 4)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        optimizer.step()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == held


@pytest.mark.parametrize("cls", CLASSES)
def test_small_stacks_side_by_side_are_bit_for_bit_those_in_turn(cls, monkeypatch):
    """Gradients come late on the caller's stream, and are gone with the step."""
    shapes = [(64, 64 + 8 * i) for i in range(20)]
    generator = torch.Generator("cuda").manual_seed(3)
    drawn = [torch.randn(s, generator=generator, device="cuda") for s in shapes]

    def trained():
        params = parameters(shapes=shapes)
        optimizer = cls(params, lr=0.05)
        for step in range(6):
            torch.cuda._sleep(3_000_000)
            for p, g in zip(params, drawn, strict=True):
                p.grad = g * (1 + step)
            optimizer.step()
            moved = [p.detach().clone() for p in params]
            optimizer.zero_grad()  # their memory is that of what comes next
            torch.full((sum(p.numel() for p in params),), math.nan, device="cuda")
        return moved

    beside = trained()
    monkeypatch.setattr(replay, "LARGEST", 0)
    for p, q in zip(beside, trained(), strict=True):
        assert torch.equal(p, q)


def test_stochastic_rounding_takes_the_direction_of_the_kernels(monkeypatch):
    weights = [torch.ones(64, 80, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for weight, fast in zip(weights, (True, False), strict=True):
        monkeypatch.setattr(engine, "runs_on", lambda device, fast=fast: fast)
        optimizer = nucleon.Leon([weight.requires_grad_()], lr=0.05, stochastic_rounding=True)
        train(optimizer, [weight], 1)
        (work,) = optimizer._worklist.works
        assert work.engine is (engine if fast else reference)
    # P differs by 1e-2 at most, so lr·P by 0.13 digits of 2⁻⁸: with the same draws so many weights
    # at most are rounded to another number, with other draws a third. 0.03 is six deviations.
    assert (weights[0] != weights[1]).float().mean() < 0.16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.memory = nn.LSTM(128, 128, batch_first=True)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.memory(x)[0]
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("cls", [nucleon.Muon, nucleon.Leon])
def test_a_whole_model_has_no_matrix_on_the_slow_path(cls):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 128), Block(), nn.Linear(128, 100)).cuda()
    optimizer = cls.for_model(model, head="2")
    losses = []
    tokens = torch.randint(100, (8, 32), device="cuda")
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    engines = [w.engine for w in optimizer._worklist.works if hasattr(w, "stack")]
    assert engines and set(engines) == {engine}
    assert math.isfinite(losses[-1]) and losses[-1] < 0.5 * losses[0]
