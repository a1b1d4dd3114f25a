"""Kill ranks of a run at random moments, resume it, and compare with a run that was left alone.

    python tests/distributed/kill_ranks.py --kills 20

Two ranks train a GPT under FSDP2, each matrix computed by its owner, and save after every step.
Each kill is a SIGKILL to one of them, or to both. Exit code 0 when a survivor ended by itself with
an error, and weights, optimizer and generators at the end are the same bit for bit.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers, also as a script

import nucleon
from helpers_states import differences
from nucleon.optim import consolidate
from nucleon.training import GPT, Checkpoints, GPTConfig, Nobody, Recipe, read, sharded, text, train

RANKS, STEPS_A_KILL, TIMEOUT = 2, 6, 20
DATA = text(read(None, 20_000), context=16)
CONFIG = GPTConfig(DATA.tokenizer.size, context=16, layers=1, heads=2, width=16, dropout=0.1)


class Keeper(Nobody):
    """Saves with all ranks."""

    def __init__(self, *what):
        self.what = what

    def save(self, done):
        checkpoints, model, optimizer = self.what
        sharded.save(checkpoints, done, model, optimizer)


def rank_main(rank, folder, meeting, steps):
    """What a rank does: begin the run, or go on with it; at the end rank 0 writes it all."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT),
    )
    torch.manual_seed(0)
    model = GPT(CONFIG)
    fully_shard(model)
    torch.manual_seed(rank)  # each drops entries of its own
    optimizer = nucleon.Leon.for_model(model, lr=0.02, placement="owner")
    checkpoints = Checkpoints(folder)
    start = sharded.load(checkpoints, model, optimizer)
    train(
        model,
        optimizer,
        lambda i: DATA.batch(i, 4, seed=0, rank=rank, world=RANKS),
        Recipe(steps, "cosine", clip=1.0, save_every=1),
        watcher=Keeper(checkpoints, model, optimizer),
        start=start,
    )
    weights = {name: p.full_tensor() for name, p in model.named_parameters()}
    generators = [torch.empty_like(torch.get_rng_state()) for _ in range(RANKS)]
    dist.all_gather(generators, torch.get_rng_state())
    state = {"model": weights, "optimizer": consolidate(optimizer), "generators": generators}
    if rank == 0:
        torch.save(state, folder / "final.pt")


def launch(folder, steps):
    """Fork the ranks off this process, which has imported all they need; their process ids."""
    meeting = tempfile.mktemp(dir=folder.parent)
    found = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, folder, meeting, steps)
                code = 0
            except BaseException as error:
                Path(f"{meeting}.{rank}.txt").write_text(repr(error), encoding="utf-8")
            finally:
                os._exit(code)
        found.append(pid)
    return found, meeting


def newest(folder):
    return max(Checkpoints(folder).steps(), default=0)


def ended(pid, seconds):
    """The exit status of a process, negative for a signal; None if it runs longer."""
    clock = time.monotonic()
    while time.monotonic() - clock < seconds:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def leave_alone(folder, steps):
    """Run to the end; seconds until the first checkpoint, and all of them."""
    clock = time.monotonic()
    pids, meeting = launch(folder, steps)
    while newest(folder) < 1 and time.monotonic() - clock < 60:
        time.sleep(0.002)
    first = time.monotonic() - clock
    codes = [ended(pid, 600) for pid in pids]
    assert codes == [0] * RANKS, [Path(f"{meeting}.{r}.txt").read_text() for r in range(RANKS)]
    return first, time.monotonic() - clock


def kill(folder, steps, delay, victims):
    """Start the ranks, kill the victims; how they and the others ended, newest before and after."""
    before, clock = newest(folder), time.monotonic()
    pids, _ = launch(folder, steps)
    while time.monotonic() - clock < delay and newest(folder) < before + STEPS_A_KILL - 2:
        time.sleep(0.001)
    for rank in victims:
        os.kill(pids[rank], signal.SIGKILL)
    codes = [ended(pid, TIMEOUT + 10) for pid in pids]
    for pid, code in zip(pids, codes, strict=True):
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes, before, newest(folder)


def survive(root, kills, generator, say=print):
    """What is wrong with a run that was killed so many times, beside one that was left alone."""
    steps, wrong = STEPS_A_KILL * (kills + 1), []
    for name in ("alone", "killed"):
        (root / name).mkdir()
    first, total = leave_alone(root / "alone", steps)
    each = (total - first) / steps
    for i in range(kills):
        # Some come while the ranks find each other, most while they train and save.
        delay = generator.random() * (first + STEPS_A_KILL * each)
        victims = generator.choice([(0,), (1,), (0, 1)])
        codes, before, after = kill(root / "killed", steps, delay, victims)
        say(f"kill {i + 1}: ranks {victims} after {delay:.2f} s, step {before} → {after}: {codes}")
        expected = [-signal.SIGKILL if rank in victims else 1 for rank in range(RANKS)]
        if codes != expected:
            wrong.append(f"kill {i + 1} ended with {codes}")
    leave_alone(root / "killed", steps)
    states = [torch.load(root / n / "final.pt", weights_only=True) for n in ("alone", "killed")]
    return wrong + differences(*states)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = survive(Path(folder), chosen.kills, random.Random(chosen.seed))
    print(f"wrong: {', '.join(found)}" if found else "the same bit for bit")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
