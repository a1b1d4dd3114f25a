"""One process at a time writes a run: real processes, really killed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers_forks import NUCLEON, Forked
from nucleon.report import load
from nucleon.training import RunError, hold
from nucleon.training.folder import check_held
from nucleon.training.run import read_log

TINY = (
    *("--task", "text", "--megabytes", "0.02", "--context", "16", "--batch", "4"),
    *("--layers", "1", "--heads", "2", "--width", "16", "--log-every", "1"),
)
HOLDING = """
import sys, time
from pathlib import Path
from nucleon.training.folder import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def started():
    """Start processes, which are gone afterwards."""
    processes = []

    def start(*words):
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=pipe, stderr=pipe, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def holder(started, folder):
    process = started("-c", HOLDING, folder)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_told_who_holds_the_folder(started, tmp_path):
    first = holder(started, tmp_path)
    with pytest.raises(RunError) as refused, hold(tmp_path):
        pytest.fail("both hold it")
    said = rf"process {first.pid} on {re.escape(socket.gethostname())} since 20\d\d-\d\d-\d\d \d\d:"
    assert re.search(said, str(refused.value))
    assert "wait until it ends" in refused.value.remedy


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_a_killed_process_holds_nothing(started, tmp_path):
    first = holder(started, tmp_path)
    first.send_signal(signal.SIGKILL)
    first.wait()
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_process_may_hold_again_what_it_holds_and_lets_go_at_the_end(started, tmp_path):
    with hold(tmp_path):
        with hold(tmp_path / "." / ".." / tmp_path.name):
            pass
        process = started("-c", HOLDING, tmp_path)
        assert process.wait() == 1
        assert f"process {os.getpid()} on" in process.stderr.read()
    holder(started, tmp_path)


def test_a_folder_that_cannot_be_locked_is_written_with_a_warning(tmp_path, monkeypatch):
    def none(_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("nucleon.training.folder._lock", none)
    with pytest.warns(RuntimeWarning, match="No locks available; let no second"), hold(tmp_path):
        # Another process, which may be refused for a run that is there, opens the same file.
        (tmp_path / ".lock").write_text("another")
        check_held(tmp_path)
    assert (tmp_path / ".lock").read_text() == "another"


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_a_folder_that_leads_elsewhere_is_not_held_any_more(tmp_path):
    here, there, run = (tmp_path / name for name in ("here", "there", "run"))
    here.mkdir()
    there.mkdir()
    run.symlink_to(here)
    with hold(run):
        check_held(run)
        run.unlink()
        run.symlink_to(there)
        with pytest.raises(RunError, match="deleted or replaced"):
            check_held(run)


def test_a_holder_that_has_not_said_its_name_yet_is_another_process(started, tmp_path):
    holder(started, tmp_path)
    (tmp_path / ".lock").write_text("{")
    with pytest.raises(RunError, match="written by another process"), hold(tmp_path):
        pass


FORKING = """
import os, sys, time
from pathlib import Path
from nucleon.training.folder import hold
with hold(Path(sys.argv[1])):
    if not os.fork():  # now it has let go of what its parent holds
        print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_of_a_killed_process_holds_nothing(tmp_path):
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(words, stdout=pipe, text=True, start_new_session=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            first.kill()
            first.wait()
            with hold(tmp_path):
                os.killpg(first.pid, 0)  # the child lives
        finally:
            os.killpg(first.pid, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_is_a_second_process(tmp_path):
    """It is refused what its parent holds, and leaving its parent's block it lets nothing go."""
    child = None
    try:
        with hold(tmp_path):
            child = os.fork()
            if not child:
                with pytest.raises(RunError, match=f"written by process {os.getppid()} on"):
                    hold(tmp_path).__enter__()
                opened = os.open(tmp_path / "own", os.O_RDWR | os.O_CREAT)  # the freed number
            else:
                assert os.waitpid(child, 0)[1] == 0
        if not child:
            os.close(opened)
            os._exit(0)
    finally:
        if child == 0:
            os._exit(1)


@pytest.mark.skipif(os.name == "nt", reason="needs pipes and links")
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_a_lock_that_is_no_plain_file_is_refused(tmp_path, kind):
    folder, victim = tmp_path / "run", tmp_path / "victim"
    said = "a link" if kind.startswith("link") else "not a plain file"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / ".lock")
    elif kind == "folder":
        (folder / ".lock").mkdir()
    else:
        (folder / ".lock").symlink_to(victim)
        if kind == "link":
            victim.write_text("precious")
    with pytest.raises(RunError, match=rf"\.lock is {said}") as refused, hold(folder):
        pytest.fail("it was locked")
    assert "delete it" in refused.value.remedy
    assert victim.exists() == (kind == "link")
    assert kind != "link" or victim.read_text() == "precious"


@pytest.fixture
def train():
    """Start trainings, which are gone afterwards."""
    processes = []

    def start(*words):
        processes.append(Forked(NUCLEON, "train", *words))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_two_trainings_in_one_folder(train, tmp_path):
    """The second is refused, the first is undisturbed; killed, its folder is free at once."""
    folder = tmp_path / "run"
    first = train(*TINY, "--steps", "1000000", "--save-every", "5", "--output", folder)
    while first.poll() is None and len(read_log(folder / "trace.jsonl")) < 6:
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # it holds its folder all the same
    for words in (("--resume",), TINY):
        second = train(*words, "--output", folder)
        _, said = second.communicate()
        assert second.returncode == 2, said
        assert "Traceback" not in said
        assert f"{folder} is being written by process {first.pid} on" in said
        assert "hint: wait until it ends" in said
    first.send_signal(signal.SIGCONT)
    before = len(read_log(folder / "trace.jsonl"))
    while first.poll() is None and len(read_log(folder / "trace.jsonl")) < before + 6:
        time.sleep(0.01)
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    Path(folder, ".manifest.json.0123456789ab.tmp").touch()  # as if killed while it wrote
    done = max(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))
    third = train("--resume", "--steps", done + 3, "--output", folder)
    _, said = third.communicate()
    assert third.returncode == 0, said
    steps = [line["step"] for line in read_log(folder / "trace.jsonl") if "loss" in line]
    assert steps == list(range(1, done + 4))  # each once: nothing is interleaved
    assert load(folder).state == "finished"
    assert not list(folder.glob(".*.tmp"))


@pytest.mark.skipif(os.name == "nt", reason="what is open cannot be deleted there")
def test_a_training_whose_lock_was_deleted_stops(train, tmp_path):
    """Whoever comes then finds no lock: the first writes nothing more, and says why."""
    folder = tmp_path / "run"
    first = train(*TINY, "--steps", "1000000", "--output", folder)
    while first.poll() is None and len(read_log(folder / "trace.jsonl")) < 3:
        time.sleep(0.01)
    (folder / ".lock").unlink()
    with hold(folder):
        _, said = first.communicate(timeout=30)
        assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()
    assert first.returncode == 2, said
    assert f"{folder / '.lock'} was deleted or replaced while this process held it" in said
    assert "Traceback" not in said
    assert load(folder).state == "running"  # as of one that was killed: it can go on
