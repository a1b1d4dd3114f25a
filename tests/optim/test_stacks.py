"""How matrices of one shape are dealt to batched calls."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nucleon
from nucleon.optim import fused, options, stacks

ROWS, COLUMNS = 2, 3


def counts_of(counts, largest):
    """How many matrices each stack has, of parameters with so many each."""
    params = [torch.empty(c, ROWS, COLUMNS, device="meta") for c in counts]
    built = stacks.build([(p, None) for p in params], largest, cut=False)
    assert [id(p) for stack in built for p in stack.params] == [*map(id, params)]
    return [[piece.count for piece in stack.pieces] for stack in built]


def greedy(counts, room):
    """The fewest stacks in order: each takes what still fits."""
    found, left = 0, -1
    for count in counts:
        if found == 0 or count > left:
            found, left = found + 1, room
        left -= count
    return found


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(1, 30), st.integers(0, 5))
def test_stacks_are_few_and_within_their_limit(counts, room, more):
    built = counts_of(counts, room * ROWS * COLUMNS + more)
    assert all(sum(stack) <= room or len(stack) == 1 for stack in built)
    assert len(built) <= greedy(counts, room)


@given(st.integers(1, 100), st.integers(1, 30))
def test_single_matrices_are_split_evenly(count, room):
    sizes = [len(stack) for stack in counts_of([1] * count, room * ROWS * COLUMNS)]
    assert len(sizes) == math.ceil(count / room)
    assert max(sizes) == math.ceil(count / len(sizes))


@pytest.mark.parametrize(
    ("make", "given_options", "expected"),
    [
        (nucleon.Leon, {}, True),
        (nucleon.Muon, {"method": "half"}, True),
        (nucleon.Pion, {}, False),  # its samples are made by torch
        (nucleon.Leon, {"certify": True}, False),
        (nucleon.Leon, {"method": "eigh"}, False),
        (nucleon.Leon, {"placement": "owner"}, False),
    ],
)
def test_the_largest_default_is_for_fused_steps(make, given_options, expected):
    optimizer = make([torch.zeros(4, 6, requires_grad=True)], lr=0.1, **given_options)
    (group,) = optimizer.param_groups
    assert fused.expected(optimizer, group) is expected
    on_cuda = {**group, "params": [SimpleNamespace(is_cuda=True)]}
    assert options.largest_stack(on_cuda, fused=expected) == 2 ** (27 if expected else 25)
    assert options.largest_stack(group, fused=expected) == 2**24
    assert options.largest_stack({**on_cuda, "largest_stack": 7}, fused=expected) == 7
