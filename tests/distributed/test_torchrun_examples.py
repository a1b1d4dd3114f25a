"""The examples run with two processes, each in one command, and their loss goes down."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"
# A thread of gloo frees the tensors of the last collective, for which it needs the interpreter; if
# that has begun to end, torch aborts the process. It takes one collective and a busy machine.
ABORTED_AT_EXIT = "terminate called without an active exception"


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_an_example_is_short_runs_and_learns(name, tmp_path):
    script = FOLDER / f"{name}.py"
    written = [line for line in script.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(written) <= 31  # thirty and the sentence on top
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(3):
        done = subprocess.run(
            [*launch, script], capture_output=True, text=True, timeout=240, cwd=tmp_path
        )
        losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", done.stdout)]
        if len(losses) < 4 or ABORTED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    assert not list(tmp_path.iterdir())
