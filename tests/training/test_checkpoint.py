import errno
import json
import os
import resource
import signal

import pytest
import torch

from helpers_forks import Forked
from nucleon.training import Checkpoints, DamagedError


def state(step):
    return {"step": step, "weight": torch.full((50,), float(step)), "group": {"dtype": torch.half}}


def same(found, step):
    return found["step"] == step and torch.equal(found["weight"], state(step)["weight"])


def fill(folder, *steps, keep=2):
    checkpoints = Checkpoints(folder / "checkpoints", keep=keep)
    for step in steps:
        checkpoints.save(step, state(step))
    return checkpoints


def test_what_is_saved_is_loaded_and_only_the_last_ones_stay(tmp_path):
    checkpoints = fill(tmp_path, 5, 10, 15, 20, keep=3)
    assert checkpoints.steps() == [10, 15, 20]
    step, found = checkpoints.newest(pytest.fail)
    assert step == 20
    assert same(found, 20)
    assert found["group"]["dtype"] is torch.half
    assert same(checkpoints.load(10), 10)
    assert (checkpoints.folder / "latest").read_text() == "step-00000020\n"
    names = sorted(path.name for path in checkpoints.folder.iterdir())
    assert names == ["latest", "step-00000010", "step-00000015", "step-00000020"]


def test_an_empty_or_missing_folder_has_none(tmp_path):
    assert fill(tmp_path).newest(pytest.fail) is None
    assert fill(tmp_path / "missing").steps() == []


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("state.pt", truncate, "state.pt is not what was written"),
        ("state.pt", flip, "state.pt is not what was written"),
        ("state.pt", os.remove, "state.pt is missing"),
        ("manifest.json", truncate, "manifest.json cannot be read"),
        ("manifest.json", os.remove, "manifest.json is missing"),
        ("manifest.json", lambda p: p.write_text("[]"), "manifest.json cannot be read"),
        ("manifest.json", lambda p: p.write_text('{"sha256": {}}'), "state.pt is missing"),
    ],
)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(tmp_path, name, damage, words):
    checkpoints = fill(tmp_path, 1, 2)
    damage(checkpoints.path(2) / name)
    with pytest.raises(DamagedError, match=words):
        checkpoints.load(2)
    said = []
    step, found = checkpoints.newest(said.append)
    assert step == 1
    assert same(found, 1)
    assert len(said) == 1
    assert words in said[0]
    assert "step 2" in said[0]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_never_displaces_a_good_one(tmp_path, keep):
    checkpoints = fill(tmp_path, 10, 30, keep=2)
    flip(checkpoints.path(30) / "state.pt")
    checkpoints.keep = keep
    checkpoints.save(20, state(20))  # the run went on from 10
    assert checkpoints.newest([].append)[0] == 20
    checkpoints.save(30, state(30))  # and comes by again
    assert checkpoints.newest(pytest.fail)[0] == 30
    assert checkpoints.steps() == [20, 30][-keep:]


def test_a_draft_that_fails_leaves_nothing(tmp_path):
    checkpoints = fill(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), checkpoints.draft(2) as folder:
        (folder / "part").write_text("half")
        raise ZeroDivisionError
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000001"]


def test_a_draft_may_have_many_files(tmp_path):
    checkpoints = fill(tmp_path, 1)
    with checkpoints.draft(2) as folder:
        for rank in range(3):
            (folder / "parts").mkdir(exist_ok=True)
            (folder / "parts" / f"{rank}.txt").write_text(str(rank))
    assert checkpoints.steps() == [1, 2]
    listed = json.loads((checkpoints.path(2) / "manifest.json").read_text())["sha256"]
    assert sorted(listed) == ["parts/0.txt", "parts/1.txt", "parts/2.txt"]
    flip(checkpoints.path(2) / "parts" / "1.txt")
    with pytest.raises(DamagedError, match=r"parts/1.txt is not"):
        checkpoints.load(2)


def test_a_full_disk_is_an_oserror_and_costs_nothing_that_was_there(tmp_path):
    checkpoints = fill(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            checkpoints.save(2, {"weight": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step-00000001"]
    assert same(checkpoints.newest(pytest.fail)[1], 1)


# A child dies at the n-th thing it does to the file system, as audit events tell, for every n.
DYING = """
import os, sys
from pathlib import Path
import torch
from nucleon.training import Checkpoints

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}

def child(folder, fatal):
    seen = 0
    def hook(event, _):
        nonlocal seen
        if event in WATCHED:
            seen += 1
            if seen == fatal:
                os._exit(9)
    sys.addaudithook(hook)
    Checkpoints(folder, keep=2).save(3, {"value": torch.tensor(3)})
    os._exit(0)

def main(root):
    fatal, status = 0, 9
    while status:
        fatal += 1
        folder = root / str(fatal)
        checkpoints = Checkpoints(folder, keep=2)
        for step in (1, 2):
            checkpoints.save(step, {"value": torch.tensor(step)})
        pid = os.fork() or child(folder, fatal)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = []
        step, state = checkpoints.newest(said.append)
        checkpoints.save(4, {"value": torch.tensor(4)})
        left = sorted(p.name for p in folder.iterdir())
        print(fatal, status, step, int(state["value"]), len(said), ",".join(left))

main(Path(sys.argv[1]))
"""


def test_a_save_may_die_at_any_moment(tmp_path):
    process = Forked(DYING, tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) > 10  # so many moments there were to die at
    steps = [int(line[2]) for line in lines]
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}  # the last complete one, old before the rename and new after it
    for _, _, step, value, said, left in lines:
        assert step == value
        assert said == "0"  # nothing half-written ever had the name of a checkpoint
        assert left.startswith((f"latest,step-0000000{step}", ".step-00000003.tmp,latest"))
