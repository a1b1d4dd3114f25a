"""The counts of benchmarks/scale.py are those of a step, to the byte and to the flop."""

import pytest
import torch

import scale
from scale import Parameter

FUSED = Parameter(24, 8, "(r r{8,2,2}) c")
SHAPES = [
    *[Parameter(8, 8)] * 3,
    *[Parameter(8, 24)] * 2,
    *[Parameter(40, 12), Parameter(4, 64), FUSED, FUSED],
]


@pytest.mark.parametrize("way", range(len(scale.WAYS)), ids=lambda i: scale.WAYS[i].name)
def test_counts_are_what_is_sent_computed_and_kept(ranks4, way):
    for dtype in (torch.float32, torch.bfloat16):
        expected = scale.count(scale.WAYS[way], SHAPES, 4, dtype.itemsize)
        measured = ranks4("step_of", way=way, shapes=SHAPES, dtype=dtype)
        assert [sent for sent, _, _ in measured] == expected.sent
        assert [flops for _, flops, _ in measured] == expected.flops
        assert [kept for _, _, kept in measured] == expected.state


def test_of_several_replicas_each_sends_its_own_gradients(ranks4):
    """As under HSDP: two replicas of two shards."""
    for way, dtype in ((6, torch.float32), (7, torch.bfloat16)):
        expected = scale.count(scale.WAYS[way], SHAPES, 4, dtype.itemsize, replicas=2)
        measured = ranks4("step_of", way=way, shapes=SHAPES, dtype=dtype, replicas=2)
        assert [sent for sent, _, _ in measured] == expected.sent
        assert [flops for _, flops, _ in measured] == expected.flops
        assert [kept for _, _, kept in measured] == expected.state


@pytest.mark.parametrize("way", [1, 5, 6], ids=lambda i: scale.WAYS[i].name)
def test_maps_of_unequal_size_move_alike_however_they_are_cut(ranks4, way):
    """Shards end within a group of heads, in rows and in columns."""
    shapes = [FUSED, FUSED, Parameter(8, 24, "r (c=2 c{6,4,2})")]
    local, other = (ranks4("weights_after", way=i, shapes=shapes) for i in (0, way))
    for mine, theirs in zip(local, other, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-12)


def test_times_are_printed_only_with_rates(capsys):
    scale.print_counts("llama-8b", 2, None, None)
    without = capsys.readouterr().out
    assert "s sent" not in without
    scale.print_counts("llama-8b", 2, 400.0, 100.0)
    rows = capsys.readouterr().out.splitlines()
    assert "s sent" in rows[2]
    assert len(rows) == len(without.splitlines()) == 3 + 4 * len(scale.WAYS)
    sent, work, _, seconds_sent, seconds_computed = map(float, rows[-1].split()[-5:])
    assert seconds_sent == pytest.approx(8 * sent / 400, abs=1e-3)
    assert seconds_computed == pytest.approx(work / 100, abs=1e-2)
