"""Stacks of matrices of one shape for batched calls."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nucleon
from nucleon.optim import polar_methods, worklist
from nucleon.optim.engines.cuda import engine
from nucleon.optim.engines.cuda.program import Program
from nucleon.optim.matrices import axes, stacks

ROWS, COLUMNS = 2, 3
(BLOCK,) = axes.parse("r c", (ROWS, COLUMNS))


def counts_of(counts, entries, *, cut):
    """The pieces of each stack, of parameters with so many matrices each."""
    params = [torch.empty(c, ROWS, COLUMNS, device="meta") for c in counts]
    built = stacks.build([(p, None) for p in params], lambda *_: entries, cut=cut)
    pieces = [(id(p.param), k) for s in built for p in s.pieces for k in range(p.start, p.stop)]
    assert pieces == [(id(p), k) for p in params for k in range(len(p))]
    return [[piece.count for piece in stack.pieces] for stack in built]


def greedy(counts, most):
    """The fewest stacks in order: each takes what still fits."""
    found, left = 0, -1
    for count in counts:
        if found == 0 or count > left:
            found, left = found + 1, most
        left -= count
    return found


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(1, 30), st.integers(0, 5))
def test_stacks_are_few_and_within_their_limit(counts, most, more):
    built = counts_of(counts, most * ROWS * COLUMNS + more, cut=False)
    assert all(sum(stack) <= most or len(stack) == 1 for stack in built)
    assert len(built) <= greedy(counts, most)


@given(st.integers(1, 100), st.integers(1, 30), st.booleans())
def test_matrices_are_split_evenly(count, most, together):
    counts = [count] if together else [1] * count
    sizes = [sum(stack) for stack in counts_of(counts, most * ROWS * COLUMNS, cut=True)]
    assert max(sizes) == math.ceil(count / math.ceil(count / most))
    assert len(sizes) <= math.ceil(count / most)


def test_a_stack_has_no_more_matrices_than_a_grid_has_programs():
    sizes = [sum(s) for s in counts_of([40_000, 40_000, 70_000], 2**40, cut=True)]
    assert max(sizes) <= stacks.LARGEST_GRID
    assert sum(sizes) == 150_000


def test_the_engine_is_asked_once_for_all_parameters_alike(monkeypatch):
    asked = []
    monkeypatch.setattr(engine, "refusal", lambda *given: asked.append(given) or "none")
    params = [torch.zeros(4, 6, requires_grad=True) for _ in range(10)]
    params += [torch.zeros(6, 4).mT.requires_grad_(), torch.zeros(8, 6, requires_grad=True)]
    for param in params:
        param.grad = torch.ones_like(param)
    nucleon.Leon(params).step()
    assert len(asked) == 3


def test_the_capacity_of_a_stack(monkeypatch):
    """2²⁴ entries on a CPU; on CUDA 2²⁵, or 2²⁷ where its engine steps them."""
    asked = []
    monkeypatch.setattr(stacks, "build", lambda pairs, capacity, **_: asked.append(capacity) or [])
    optimizer = nucleon.Leon([torch.zeros(ROWS, COLUMNS)])
    like = {"dtype": None, "device": None, "shape": (2, 3), "stride": lambda: (3, 1)}
    cpu, cuda = (SimpleNamespace(is_cuda=there, **like) for there in (False, True))

    def capacity(param, serves, **own):
        monkeypatch.setattr(engine, "sides", lambda *_: () if serves else None)
        worklist.matrices(optimizer, 0, optimizer.param_groups[0] | own, [])
        return asked.pop()(param, BLOCK)

    assert capacity(cpu, False) == 2**24
    assert capacity(cuda, False) == 2**25
    assert capacity(cuda, True) == 2**27
    assert capacity(cuda, True, largest_stack=7) == 7


def test_matrices_of_two_engines_are_not_in_one_stack():
    params = [torch.zeros(4, 4), torch.zeros(4, 4).mT, torch.zeros(4, 4)]
    built = stacks.build(
        [(p, None) for p in params], lambda *_: 2**20, key_of=lambda p, _: p.is_contiguous()
    )
    kinds = [[p.is_contiguous() for p in stack.params] for stack in built]
    assert len(built) in (1, 2) and all(len(set(kind)) == 1 for kind in kinds)


def test_a_bucket_has_the_least_room_of_its_parameters():
    shapes = {"r c": (ROWS, COLUMNS), "c r": (COLUMNS, ROWS)}
    params = [(torch.empty(shapes[s], device="meta"), s) for s in ("r c", "r c", "c r")]
    rooms = iter([3, 3, 1])
    built = stacks.build(params, lambda *_: next(rooms) * ROWS * COLUMNS)
    assert [len(stack.pieces) for stack in built] == [1, 1, 1]


@pytest.mark.parametrize(
    ("count", "rows", "columns", "captured"),
    [(12, 768, 3072, True), (24, 4096, 1024, True), (8, 8192, 2048, False), (1, 4096, 4096, False)],
)
def test_stacks_of_large_products_are_not_captured(count, rows, columns, captured):
    layout = SimpleNamespace(count=count)
    program = SimpleNamespace(m=min(rows, columns), layout=layout, draws=None)
    assert Program.captured.func(program) is captured


def test_what_is_float16_by_itself(monkeypatch):
    monkeypatch.setattr(polar_methods, "triton_works", lambda: True)
    uncached = polar_methods.method_for.__wrapped__
    monkeypatch.setattr(polar_methods, "method_for", uncached)
    cuda, group = torch.device("cuda"), {"method": "auto", "iterations": 5}

    def chosen(m, n, device=cuda, dtype=torch.float32, **other):
        return polar_methods.chosen_method(group | other, m, n, device, dtype)

    assert chosen(64, 64) == chosen(2**15, 2**16 - 1, dtype=torch.bfloat16) == "half"
    others = [chosen(63, 64), chosen(64, 64, torch.device("cpu")), chosen(2**15, 2**16)]
    others += [chosen(64, 64, dtype=torch.float64), *(chosen(64, 64, iterations=k) for k in (4, 6))]
    assert set(others) == {"polar-express"}
    with pytest.raises(ValueError, match="method='half' is for matrices below"):
        chosen(2**15, 2**16, method="half")


def test_looking_leaves_every_moment_where_it_lies(monkeypatch):
    """Another memory format moves Ĝ, once there is something to step."""
    monkeypatch.setattr(engine, "runs_on", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = torch.zeros(64, 8, 3, 3, requires_grad=True)
    optimizer = nucleon.Leon([weight], axes="r c c c", method="half")
    weight.data = weight.data.to(memory_format=torch.channels_last)
    states = optimizer.state
    before = states[weight]["total"]
    optimizer.diagnostics()
    assert states[weight]["total"] is before
    worklist.build(optimizer, optimizer._current_settings())
    assert states[weight]["total"].stride() == weight.stride() != before.stride()
