"""The examples run with two processes, each in one command, and their losses go down."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "examples"
# A thread of gloo frees the tensors of the last collective, for which it needs the interpreter; if
# that has begun to end, torch aborts the process. It takes one collective and a busy machine.
ABORTED_AT_EXIT = "terminate called without an active exception"
SMALL = {"width": 32, "heads": 2, "layers": 1, "context": 32, "batch": 8, "device": "cpu"}
WORDS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


def losses(folder, words, count):
    """Run an example on two ranks in an empty folder; return the losses that it printed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(3):
        done = subprocess.run(
            [*launch, *map(str, words)], capture_output=True, text=True, timeout=240, cwd=folder
        )
        found = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
        if len(found) < count or ABORTED_AT_EXIT not in done.stderr:
            break
        shutil.rmtree(folder)  # a checkpoint would be resumed
        folder.mkdir()
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def test_fsdp2_is_short_and_learns(tmp_path):
    script = FOLDER / "distributed" / "fsdp2.py"
    written = [line for line in script.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(written) <= 31  # thirty and the sentence on top
    found = losses(tmp_path, [script], 4)
    assert len(found) == 4
    assert found[-1] < 0.9 * found[0]
    assert not list(tmp_path.iterdir())


def test_a_gpt_learns_on_two_ranks_and_its_checkpoint_is_whole(tmp_path):
    words = [FOLDER / "train_gpt.py", *WORDS, "--log-every", 10, "--steps", 40, "--folder", "."]
    found = losses(tmp_path, words, 4)
    assert found[-1] < 0.9 * found[0]
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == kept["model"].keys()
    assert kept["step"] == 40
    states = kept["optimizer"]["state"].values()  # of every rank's matrices, on rank 0
    assert len(kept["model"]) == len(states) == 12
    assert sum("total" in state for state in states) == 6
