"""Kill a training run at random moments, resume it, and compare with a run that was left alone.

    python tests/training/killing.py --kills 20

The first half of the kills comes at any moment after the start of a process, the second half soon
after it began to save, which it does after every step. Exit code 0 when all of them found the run
alive, no manifest they left was damaged, and the weights, the optimizer's state, torch's generator
and the log at the end are the same bit for bit.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers, also as a script

from helpers_forks import NUCLEON, Forked
from helpers_states import differences
from nucleon.report import load
from nucleon.training import Checkpoints
from nucleon.training.run import read_log

STEPS_A_KILL = 20
"""A run that came so far is killed at once: so it is alive at every kill."""

MODEL = {"batch": 4, "megabytes": 0.02, "context": 16, "layers": 1, "heads": 2, "width": 16}
RECIPE = {"schedule": "cosine", "warmup": 5, "clip": 1, "dropout": 0.1}
KEPT = {"log-every": 1, "evaluate-every": 40, "save-every": 1}
"""A GPT with everything on that has, or could have, a state."""


def start(folder, optimizer, steps):
    """Begin the run, or go on with it, as a user does."""
    task = {"task": "text", "optimizer": optimizer, "steps": steps}
    options = {**task, **MODEL, **RECIPE, **KEPT}
    begin = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words = ["--resume"] if (folder / "run.json").exists() else begin
    return Forked(NUCLEON, "train", *words, "--output", folder)


def newest(folder):
    return max(Checkpoints(folder / "checkpoints").steps(), default=0)


def wait(process, folder, step, seconds=600.0):
    """Wait for a checkpoint of that step or a later one, or so long; how long it took."""
    clock = time.monotonic()
    while process.poll() is None and newest(folder) < step:
        if time.monotonic() - clock > seconds:
            break
        time.sleep(0.001)
    return time.monotonic() - clock


def finish(process):
    _, err = process.communicate()
    assert process.returncode == 0, err


def kill(folder, optimizer, steps, at, usual_start):
    """Start and kill; whether it was still running then, and the newest step before and after."""
    before, process = newest(folder), start(folder, optimizer, steps)
    if at >= 0.5:
        wait(process, folder, before + 1)
    wait(process, folder, before + STEPS_A_KILL - 5, at * (2 * usual_start if at < 0.5 else 0.1))
    process.kill()
    process.communicate()
    if (folder / "manifest.json").exists():
        assert load(folder).state == "running"
    return process.returncode == -signal.SIGKILL, before, newest(folder)


def final(folder):
    """The state and the log at the end of a run."""
    step, state = Checkpoints(folder / "checkpoints").newest(print)
    return {"step": step, "state": state, "log": read_log(folder / "trace.jsonl")}


def survive(root, kills, optimizer, generator, say=print):
    """What is wrong with a run that was killed so many times, beside one that was left alone."""
    steps = STEPS_A_KILL * (kills + 1)
    alone = start(root / "alone", optimizer, steps)
    usual_start = wait(alone, root / "alone", 1)
    finish(alone)
    late = 0
    for i in range(kills):
        at = (i + generator.random()) / kills  # stratified: few kills too come at all moments
        hit, before, after = kill(root / "killed", optimizer, steps, at, usual_start)
        late += not hit
        say(f"kill {i + 1}: {'killed' if hit else 'too late'}, from step {before} to {after}")
    finish(start(root / "killed", optimizer, steps))
    assert [load(root / name).state for name in ("alone", "killed")] == ["finished"] * 2
    found = differences(final(root / "alone"), final(root / "killed"))
    return found + [f"{late} kills came too late"] * bool(late)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--optimizer", default="leon")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = survive(Path(folder), chosen.kills, chosen.optimizer, random.Random(chosen.seed))
    print(f"wrong: {', '.join(found)}" if found else "the same bit for bit")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
