"""The parts of a placement that need no second process."""

from itertools import product
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from nucleon.optim.engines.ranks import placement, wire
from nucleon.optim.matrices import shards

sides = st.integers(0, 40)
blocks = st.tuples(st.integers(0, 3), sides, sides)
parameters = st.lists(st.lists(blocks, min_size=1, max_size=2).map(tuple), max_size=30).map(tuple)


def cost(parameter):
    """m²n + m³ of every block: what five m×m and m×n products are proportional to."""
    return sum(b * (min(r, c) ** 2 * max(r, c) + min(r, c) ** 3) for b, r, c in parameter)


@settings(deadline=None, max_examples=200)
@given(parameters, st.integers(1, 9))
def test_shares_are_runs_of_about_equal_cost(sizes, parts):
    share = placement.shares(sizes, parts)
    assert len(share) == len(sizes)
    assert set(share) <= set(range(parts))
    costs = [cost(parameter) for parameter in sizes]
    largest = sum(costs) / parts + max(costs, default=0)
    for part in range(parts):
        assert sum(c for c, s in zip(costs, share, strict=True) if s == part) <= largest
    # Runs: the dearer a parameter, the earlier its rank; equal ones lie side by side.
    order = sorted(range(len(sizes)), key=lambda i: (-costs[i], sizes[i]))
    assert [share[i] for i in order] == sorted(share)


def test_a_fingerprint_sees_a_bit_and_a_place():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.arange(12, dtype=dtype).view(3, 4)
        assert wire.fingerprint(x) == wire.fingerprint(x.clone())
        assert wire.fingerprint(x) != wire.fingerprint(x.flip(0))
        y = x.clone()
        y[1, 2] = torch.nextafter(y[1, 2], y[2, 2]) if dtype != torch.bfloat16 else 6.03125
        assert wire.fingerprint(x) != wire.fingerprint(y)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 25), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_boxes_are_chunks_of_chunks(rows, outer, inner, strided):
    """Plain Shards cut from the outer axis of the mesh inwards, FSDP2 over tensor parallel last."""
    first = _StridedShard(0, split_factor=inner) if strided else Shard(0)
    mesh = SimpleNamespace(shape=(2, outer, inner), mesh=torch.arange(2 * outer * inner))
    placed = (Replicate(), first, Shard(0))
    param = SimpleNamespace(shape=(rows, 3), ndim=2, placements=placed, device_mesh=mesh)
    shards.check_supported("w", param)
    held = shards.of(param)
    entries = torch.arange(rows)
    for (copy, i, j), (box, columns) in zip(
        product(range(2), range(outer), range(inner)), held.boxes, strict=True
    ):
        order = ((inner, j), (outer, i)) if strided else ((outer, i), (inner, j))
        expected = entries
        for parts, index in order:
            chunks = expected.chunk(parts)
            expected = chunks[index] if index < len(chunks) else entries[:0]
        assert torch.equal(entries[box], expected)
        assert columns == slice(0, 3)
        assert held.replica_of((copy * outer + i) * inner + j)[0] == copy * outer * inner
