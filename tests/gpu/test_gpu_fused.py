"""The fused step and its replay on CUDA: as the torch path, whatever moves or changes."""

import copy
import math

import pytest
import torch

import nucleon
from nucleon.optim.engines.cuda import engine, program, replay

SHAPES = [(64, 200), (64, 200), (200, 72), (96, 96), (3, 64, 80), (130, 1030)]
CLASSES = [nucleon.Muon, nucleon.Leon, nucleon.Pion]
CASES = {
    "plain": {},
    "decay": {"weight_decay": 0.1, "nesterov": True},
    "climbing": {"weight_decay": 0.1, "maximize": True},
    "bf16 momentum": {"momentum_dtype": torch.bfloat16},
    "exponential": {"step_length": "exponential", "lr": torch.tensor(0.05)},
}


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).to("cuda", dtype).requires_grad_() for s in shapes]


def train(optimizer, params, steps, start=0, spoil=None, at=0):
    """New gradients each step, at other addresses; number `spoil` of step 3 is not finite.

    Each begins at entry `at` of a buffer.
    """
    held = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for i, p in enumerate(params):
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (i - 2)
            if (step, i) == (3, spoil):
                gradient.view(-1)[7] = math.inf
            held.append(torch.empty(at + p.numel(), device=p.device, dtype=p.dtype))
            p.grad = held[-1][at:].view(p.shape).copy_(gradient)  # and never freed
        optimizer.step()
    return params


def recordings(optimizer):
    made = optimizer._worklist
    caches = [work.cache for work in made.works] if made else []
    return [cache.recording for cache in caches if isinstance(cache, engine.Cache)]


def graphs(optimizer):
    return [recording.replay.graph for recording in recordings(optimizer)]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_fused_step_is_that_of_the_torch_path(cls, dtype, options, monkeypatch):
    options = {"lr": 0.05, **options}
    if isinstance(options["lr"], torch.Tensor):
        options["lr"] = options["lr"].cuda()
    params, others = parameters(dtype), parameters(dtype)
    optimizer = cls(params, **options)
    train(optimizer, params, 5, spoil=1)
    assert graphs(optimizer) and all(graphs(optimizer))
    monkeypatch.setattr(engine, "runs_on", lambda device: False)
    other = cls(others, **options)
    train(other, others, 5, spoil=1)
    assert not recordings(other)
    eps = torch.finfo(dtype).eps
    for p, q in zip(params, others, strict=True):
        a, b = optimizer.state[p], other.state[q]
        assert torch.equal(a["skipped"], b["skipped"])
        close = {"rtol": 1e-5, "atol": 1e-6 * b["total"].abs().max().item()}
        if a["total"].dtype == torch.bfloat16:
            close["rtol"] = 3 * 2.0**-8
        torch.testing.assert_close(a["total"], b["total"], **close)
        if "gram" in a:  # of gradients that were rounded to float16
            difference = torch.linalg.matrix_norm(a["gram"] - b["gram"])
            assert torch.equal(a["gram"], a["gram"].mT)
            assert (difference <= 2**-10 * torch.linalg.matrix_norm(b["gram"])).all()
        # Two float16 recursions of operands that differ in their last bits; five steps of 0.05,
        # each of Exp(1) length at most.
        scale = math.sqrt(max(1.0, p.shape[-2] / p.shape[-1]))
        length = 4.0 if "step_length" in options else 1.0
        near = (p - q).abs() <= 0.01 * 5 * 0.05 * scale * length + 4 * eps * q.abs()
        assert near.all()
    assert optimizer.state[params[1]]["skipped"].item() == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_a_replay_is_bit_for_bit_the_launches_it_replaces(cls, monkeypatch):
    first = train(cls(p := parameters(), weight_decay=0.1), p, 6)
    monkeypatch.setattr(program, "LARGEST", 0)  # as of larger stacks
    optimizer = cls(p := parameters(), weight_decay=0.1)
    second = train(optimizer, p, 6)
    assert graphs(optimizer) and not any(graphs(optimizer))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_may_begin_anywhere_in_a_buffer(dtype):
    """As those of DistributedDataParallel in their buckets do."""
    first = train(nucleon.Leon(p := parameters(dtype)), p, 4)
    others = parameters(dtype)
    optimizer = nucleon.Leon(others)
    train(optimizer, others, 2, at=1)
    before = graphs(optimizer)
    assert all(before)
    train(optimizer, others, 2, start=2, at=0)  # other kernels: captured anew
    assert not any(graph in before for graph in graphs(optimizer))
    for a, b in zip(first, others, strict=True):
        assert torch.equal(a, b)


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


@pytest.mark.parametrize("cls", CLASSES)
def test_a_missing_gradient_is_a_mask(cls):
    """Of a stack of two and of an expert: nothing of what has none moves, the others go on."""
    shapes = [(64, 200), (64, 200), (96, 96)]
    params, alone = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizer, other = cls(params), cls(alone[:1])
    for step in range(8):
        train(optimizer, params, 1, start=step)
        train(other, alone[:1], 1, start=step)
        before = [p.detach().clone() for p in params]
        states = copy.deepcopy([optimizer.state[p] for p in params])
        for p in params[1 + step % 2 :]:
            p.grad = None
        optimizer.step()
        other.step()
        for p, old, state in list(zip(params, before, states, strict=True))[1 + step % 2 :]:
            assert torch.equal(p, old)
            found = optimizer.state[p]
            assert all(torch.equal(found[name], state[name]) for name in state if name != "step")
    assert ((params[0] - alone[0]).abs() <= 0.01 * 16 * 0.02).all()


@pytest.mark.parametrize("cls", CLASSES)
def test_the_hook_that_a_user_writes_is_the_one_that_runs(cls):
    class Still(cls):
        def direction(self, total, smoothing, context):
            return torch.zeros_like(total)

    params, before = parameters(), parameters()
    train(Still(params), params, 3)
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("to", ["instance", "class"])
def test_a_hook_that_is_assigned_later_is_the_one_that_runs(cls, to, monkeypatch):
    """Though the step before it was a graph."""
    params = parameters()
    optimizer = cls(params)
    train(optimizer, params, 3)
    assert all(graphs(optimizer))
    before = [p.detach().clone() for p in params]
    target = optimizer if to == "instance" else cls
    monkeypatch.setattr(target, "direction", lambda *given: torch.zeros_like(given[-3]))
    train(optimizer, params, 2, start=3)
    assert not recordings(optimizer)
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)


def test_a_schedule_of_the_momentum_is_not_captured():
    params = parameters(shapes=SHAPES[:1])
    optimizer = nucleon.Muon(params)
    for step in range(4):
        optimizer.param_groups[0]["momentum"] = 0.9 + 0.01 * step
        train(optimizer, params, 1, start=step)
    assert graphs(optimizer) == [None]


def test_options_that_change_once_are_followed_and_captured_anew(monkeypatch):
    """All graphs are given up together, and with them the memory they share."""

    def trained():
        params = parameters()
        optimizer = nucleon.Leon(params, lr=0.1)
        for step, momentum in enumerate([0.9] * 3 + [0.95] * 3):
            optimizer.param_groups[0]["momentum"] = momentum
            train(optimizer, params, 1, start=step)
        return optimizer, params

    one, params = trained()
    assert all(graphs(one))
    monkeypatch.setattr(replay, "_captured", lambda *_: None)
    _, others = trained()
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)


def test_a_capture_that_fails_is_done_without(monkeypatch):
    params, others = parameters(), parameters()
    train(nucleon.Leon(others), others, 4)
    launch = engine.launch

    def failing(*args):
        launch(*args)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError

    monkeypatch.setattr(engine, "launch", failing)
    optimizer = nucleon.Leon(params)
    train(optimizer, params, 4)
    assert all(r.replay.fails for r in recordings(optimizer)) and not any(graphs(optimizer))
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)


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


def test_queries_keys_and_values_are_fused_with_a_projection():
    params = parameters(shapes=[(192, 64), (64, 64)])
    optimizer = nucleon.Leon(params, axes=["(b=3 r) c", None])
    train(optimizer, params, 3)
    (graph,) = graphs(optimizer)
    assert graph is not None


def test_a_learning_rate_on_the_host_with_random_lengths_and_decay():
    params = parameters()
    lr = torch.tensor(0.05)
    options = {"step_length": "exponential", "weight_decay": 0.1}
    train(nucleon.Leon(params, lr=lr, **options), params, 3)
    train(nucleon.Leon(others := parameters(), lr=lr.cuda(), **options), others, 3)
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("cls", CLASSES)
def test_a_graph_of_the_user_holds_the_whole_step(cls):
    eager, captured = parameters(), parameters()
    one, two = cls(eager, lr=0.1), cls(captured, lr=0.1)
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
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_a_step_stays_in_the_ball(cls, condition):
    generator = torch.Generator().manual_seed(5)
    u = torch.linalg.qr(torch.randn(128, 128, generator=generator, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(300, 128, generator=generator, dtype=torch.float64)).Q
    gradient = (u * torch.logspace(0, -math.log10(condition), 128)) @ v.mT
    weight = torch.zeros(128, 300, device="cuda", requires_grad=True)
    optimizer = cls([weight], lr=1.0, momentum=0.0, scale="none")
    for _ in range(3):
        weight.detach().zero_()
        weight.grad = gradient.float().cuda()
        optimizer.step()
        assert torch.linalg.matrix_norm(weight.detach().double(), 2) <= 1.01


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
