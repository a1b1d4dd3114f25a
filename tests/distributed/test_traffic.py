"""A step over ranks sends what `docs/distributed.md` says, and owners divide work and moments."""

import pytest
import torch

from nucleon.optim.matrices import axes

RANKS = 4
FUSED = (24, 8, "(r r{8,2,2}) c")
SHAPES = [*[(8, 8, "r c")] * 3, *[(8, 24, "r c")] * 2, (40, 12, "r c"), (4, 64, "r c")]
SHAPES += [FUSED, FUSED]


def sent_by_all(sharded, placement, gradient, direction, replicas):
    """Sum over the ranks, by the table of the page, with a flag for each message of a matrix."""
    total, parts = 0, RANKS // replicas
    for rows, columns, text in SHAPES:
        blocks = axes.parse(text, (rows, columns))
        entries, matrices = rows * columns, sum(block.count for block in blocks)
        if placement == "owner" and not sharded:
            total += (RANKS - 1) * direction * (entries + matrices)
        elif placement == "owner":
            total += (parts - 1) * gradient * (entries // parts + len(blocks))
            total += (RANKS - 1) * direction * (entries // parts + matrices)
        elif sharded:  # the whole weight once for each of its shapes
            total += (RANKS - 1) * gradient * len(blocks) * entries
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("method", "sharded", "placement", "wire_dtype", "replicas"),
    [
        ("leon", False, "local", None, 1),
        ("leon", False, "owner", None, 1),
        ("leon", False, "owner", torch.bfloat16, 1),
        ("muon", True, "local", None, 1),
        ("muon", True, "owner", None, 1),
        ("leon", True, "local", None, 1),
        ("leon", True, "owner", None, 1),
        ("leon", True, "owner", torch.bfloat16, 1),
        ("leon", True, "owner", None, 2),
    ],
)
def test_what_a_step_sends_computes_and_keeps(
    ranks4, dtype, method, sharded, placement, wire_dtype, replicas
):
    options = {"shapes": SHAPES, "method": method, "dtype": dtype}
    chosen = {"sharded": sharded, "placement": placement, "wire_dtype": wire_dtype}
    sent, flops, kept = zip(
        *ranks4("cost_of_a_step", **options, **chosen, replicas=replicas), strict=True
    )
    direction = wire_dtype.itemsize if wire_dtype else 4
    expected = sent_by_all(sharded, placement, dtype.itemsize, direction, replicas)
    if sharded and placement == "local":  # and an all-reduce of flags for each stack
        assert 0 < sum(sent) - expected <= RANKS * 2 * (RANKS - 1) * len(SHAPES) * 3
    else:
        assert sum(sent) == expected
    alone = ranks4("cost_of_a_step", **options, sharded=False, placement="local")[0]
    copies = 1 if placement == "owner" else RANKS
    assert sum(flops) == copies * alone[1]
    assert sum(kept) == copies * alone[2]


@pytest.mark.parametrize(
    ("sharded", "placement"), [(False, "owner"), (True, "local"), (True, "owner")]
)
def test_maps_of_unequal_size_move_alike_however_they_are_cut(ranks4, sharded, placement):
    """Shards end within a group of heads, in rows and in columns."""
    shapes = [FUSED, FUSED, (8, 24, "r (c=2 c{6,4,2})")]
    options = {"shapes": shapes, "method": "leon", "dtype": torch.float64}
    expected = ranks4("weights_after", **options, sharded=False, placement="local")
    found = ranks4("weights_after", **options, sharded=sharded, placement=placement)
    for mine, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-12)
