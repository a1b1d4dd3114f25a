"""The kernels of a whole step, in Triton's interpreter; on the GPU they are in `tests/gpu`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nucleon
from nucleon.optim import axes, stacks

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_fused_step_in_the_interpreter():
    # A process of its own: Triton decides at import whether it compiles or interprets.
    source = str(Path(nucleon.__file__).parents[1])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": source}
    run = subprocess.run(
        [sys.executable, str(HERE / "interpreted_step.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all agree" in run.stdout


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((6, 8), "r c"),
        ((3, 6, 8), "b r c"),
        ((6, 8), "(b=3 r) c"),
        ((6, 8), "r (b=2 c)"),
        ((6, 8), "r{2,4} c"),
        ((2, 3, 6, 8), "b b r c"),
        ((4, 3, 2, 2), "r c c c"),
        ((12, 3, 2, 2), "(b=4 r) c c c"),
    ],
)
def test_the_layout_says_where_the_matrices_are(shape, spec):
    param = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    for stack in stacks.build([(param, spec)], 20):  # pieces of a few matrices
        layout = stack.layout
        assert layout is not None
        flat, (rows, columns) = param.reshape(-1), stack.shape
        found = [
            flat.as_strided((rows, columns), (layout.stride, 1), offset + k * layout.inner)
            for offset in layout.offsets
            for k in range(layout.each)
        ]
        expected = torch.cat([piece.matrices(param) for piece in stack.pieces])
        assert torch.equal(torch.stack(found), expected)


def test_no_layout_where_one_rule_does_not_do():
    transposed = stacks.build([(torch.zeros(6, 8), "c r")], 2**20)
    assert [stack.layout for stack in transposed] == [None]
    unequal = stacks.build([(torch.zeros(3, 4, 5), None), (torch.zeros(4, 5), None)], 2**20)
    assert len(unequal) == 1
    assert unequal[0].layout is None
    assert axes.default(2) == "r c"
