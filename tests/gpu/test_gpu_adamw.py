"""AdamW's kernels on a CUDA device: graphs, large tensors, counts of launches."""

import math

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

from optim import adamw_cases as cases

CUDA = torch.device("cuda")


def many(dtype=torch.float32, count=200):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 4000, (count,), generator=generator).tolist()
    params = cases.parameters(CUDA, dtype, [(n,) for n in sizes])
    flat = torch.randn(sum(sizes), generator=generator).to(CUDA, dtype)
    for p, g in zip(params, flat.split(sizes), strict=True):  # at any offset, as in DDP's buckets
        p.grad = g
    return params


def launches(optimizer):
    """The kernels of one step, by name; copies are none."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        optimizer.step()
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return [name for name in names if not name.startswith("Mem")]


@pytest.mark.parametrize("fresh", [False, True])
def test_four_launches_for_any_number_of_parameters(fresh):
    """Also when gradients are elsewhere than at the last step."""
    params = many()
    optimizer = cases.optimizer_of(params)
    for _ in range(3):
        cases.step(optimizer)
    if fresh:
        held = [p.grad for p in params]
        for p, g in zip(params, held, strict=True):
            p.grad = g.clone()
    found = launches(optimizer)
    assert 3 <= len(found) <= 4, found
    assert {"look", "decide", "update"} <= set(found)


@pytest.mark.parametrize("warm", [True, False])
def test_the_callers_graph_takes_the_same_steps(warm):
    ours, theirs = (cases.parameters(CUDA) for _ in range(2))
    one, two = (cases.optimizer_of(p, weight_decay=0.1) for p in (ours, theirs))
    compiled = cases.optimizer_of(other := cases.parameters(CUDA))
    for params in (ours, theirs, other):
        cases.give_gradients(params, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cases.step(compiled)  # kernels are compiled and loaded
        if warm:
            cases.step(two)
    torch.cuda.current_stream().wait_stream(stream)
    if warm:
        cases.step(one)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.step(two)
    for round_ in range(3):
        for params in (ours, theirs):
            generator = torch.Generator().manual_seed(round_)
            for i, p in enumerate(params):
                p.grad.copy_(torch.randn(p.shape, generator=generator))
                if (round_, i) == (1, 4):
                    p.grad[5] = math.nan
        cases.step(one)
        graph.replay()
    for a, b in zip(cases.bits(one, ours), cases.bits(two, theirs), strict=True):
        assert all(map(torch.equal, a, b))
    assert two.state[theirs[4]]["skipped"].item() == 1


def test_a_graph_outlives_the_worklist_it_was_captured_with():
    params = cases.parameters(CUDA)
    optimizer = cases.optimizer_of(params, lr=torch.tensor(0.01, device=CUDA))
    cases.give_gradients(params, 0)
    cases.step(optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases.step(optimizer)
    optimizer._worklist = None
    junk = [torch.full((2**16,), 7, device=CUDA) for _ in range(64)]  # where its tables were
    graph.replay()
    torch.cuda.synchronize()
    assert all(optimizer.state[p]["step"].item() == 2 for p in params)
    assert all(int(x[0]) == 7 for x in junk)


def test_no_synchronization():
    params = many()
    optimizer = cases.optimizer_of(params)
    cases.step(optimizer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            for p in params:
                p.grad = p.grad.clone()
            cases.step(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_a_large_tensor_has_offsets_beyond_32_bits():
    """2³¹ entries and a few, in bfloat16: 4 GiB of weights and of gradient, 16 of moments."""
    size = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    weight = torch.ones(size, dtype=torch.bfloat16, device=CUDA).requires_grad_()
    weight.grad = torch.ones_like(weight)
    optimizer = cases.optimizer_of([weight], lr=0.25)
    cases.step(optimizer)
    assert (weight.detach() == 0.75).all()
    weight.grad[-1] = math.inf
    cases.step(optimizer)
    assert (weight.detach() == 0.75).all()
    assert optimizer.state[weight]["skipped"].item() == 1


def test_a_graph_is_replayed_and_its_tables_are_kept():
    params = cases.parameters(CUDA)
    optimizer = cases.optimizer_of(params)
    cases.give_gradients(params, 0)
    cases.step(optimizer)
    (bucket,) = optimizer._worklist.works[0].cache
    tables = bucket.followed.result
    assert tables.replay.graph is None
    cases.step(optimizer)
    gradients, graph = tables.gradients.tensor, tables.replay.graph
    assert graph is not None
    params[0].grad = params[0].grad.clone()
    optimizer.param_groups[0]["lr"] = 0.5
    cases.step(optimizer)
    assert bucket.followed.result is tables
    assert tables.gradients.tensor is gradients and tables.replay.graph is graph
    assert gradients.tolist() == tables.gradients.known
    assert tables.lr.tensor.item() == 0.5
    optimizer.param_groups[0]["eps"] = 1e-4
    cases.step(optimizer)
    assert tables.replay.graph is None
    cases.step(optimizer)
    assert tables.replay.graph is not None
