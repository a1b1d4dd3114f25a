"""Whatever goes wrong: a clear message, nothing already written is lost, --resume goes on."""

import errno
import os
import pathlib
import shutil
import signal
from pathlib import Path

import pytest

from nucleon.claims import Progress, Settings
from nucleon.cli import jobs
from nucleon.cli.jobs import check
from nucleon.report.runs import load
from toys import toy


def interrupt(run):
    raise KeyboardInterrupt


def kill_itself(run):
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------ folders and disks


def test_an_output_folder_that_cannot_be_is_named_before_anything_runs(command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    reached = []
    claim = toy(run=lambda *_: reached.append(1))
    output = tmp_path / "file" / "runs"
    done = command("reproduce", "toy", "--output", output, claims=[claim])
    assert done.exit_code == 2
    assert f"{output / 'toy'}: Not a directory" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.output
    assert not reached


class FullDisk:
    """Lets so many files be written, then none."""

    def __init__(self, monkeypatch, room):
        self.left, write = room, pathlib.Path.write_bytes

        def limited(path, content):
            self.left -= 1
            if self.left < 0:
                write(path, content[: len(content) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(path, content)

        monkeypatch.setattr(pathlib.Path, "write_bytes", limited)


def test_a_full_disk_costs_files_not_answers(command, runs, tmp_path, monkeypatch):
    claims = [toy(name="first"), toy(name="second"), toy(name="third")]
    go = ("reproduce", "--all", "--jobs", "1", "--output", tmp_path)
    with monkeypatch.context() as patched:
        FullDisk(patched, 4)  # the first run writes its three texts, the second not all
        done = command(*go, claims=claims)
    assert done.exit_code == 2
    assert "PASS  second" in done.stdout  # the answer was there before the disk was full
    assert "No space left on device\n" in done.stderr
    assert "hint: check the path, and that there is room" in done.stderr
    assert "--resume goes on" in done.stderr
    assert not (tmp_path / "third").exists()  # it could not be saved either
    assert list((tmp_path / "second").iterdir()) == []
    (kept,) = runs(tmp_path, "first")
    assert load(kept).manifest["passed"]
    done = command(*go, "--resume", claims=claims)
    assert done.exit_code == 0
    assert "PASS  first, as checked before" in done.stdout
    assert runs(tmp_path, "first") == [kept]


def test_the_page_before_stays_when_the_new_one_does_not_fit(command, runs, tmp_path, monkeypatch):
    go = ("reproduce", "toy", "--output", tmp_path)
    command(*go, claims=[toy()])
    before = (tmp_path / "report.html").read_text()
    FullDisk(monkeypatch, 3)  # the run, but not the page
    done = command(*go, claims=[toy()])
    assert done.exit_code == 2
    assert f"{tmp_path / 'report.html'}: No space left on device" in done.stderr
    assert len(runs(tmp_path)) == 2
    assert (tmp_path / "report.html").read_text() == before
    assert {p.name for p in tmp_path.iterdir()} == {"toy", "report.html"}


# ------------------------------------------------------------------ ended from outside


def test_an_interrupt_keeps_what_was_finished(command, runs, tmp_path):
    claims = [toy(name="first"), toy(name="second", run=interrupt)]
    done = command("reproduce", "--all", "--jobs", "1", "--output", tmp_path, claims=claims)
    assert done.exit_code == 130
    assert "nucleon: interrupted" in done.stderr
    assert "--resume" in done.stderr
    assert len(runs(tmp_path, "first")) == 1
    assert list((tmp_path / "second").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_a_job_that_is_killed_is_named(command, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "START", "fork")  # soon, and nothing is measured
    claims = [toy(name="first", run=kill_itself), toy(name="second", run=kill_itself)]
    done = command("reproduce", "--all", "--jobs", 2, "--output", tmp_path, claims=claims)
    assert done.exit_code == 2
    assert "a process was killed" in done.stderr
    assert "hint: run the same command with --resume and fewer --jobs" in done.stderr


# ------------------------------------------------------------------ damaged runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two runs, to be copied and damaged."""
    root = tmp_path_factory.mktemp("whole")
    for name in ("good", "hurt"):
        check(toy(name=name), Settings(), root, Progress(), debug=True)
    return root


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_text("{}")


@pytest.mark.parametrize("harm", [Path.unlink, cut, empty])
@pytest.mark.parametrize("file", ["manifest.json", "result.json"])
def test_a_damaged_run_is_named_and_the_others_are_reported(
    command, runs, tmp_path, whole, file, harm
):
    root = tmp_path / "runs"
    shutil.copytree(whole, root)
    (folder,) = runs(root, "hurt")
    harm(folder / file)
    page = tmp_path / "page.html"
    done = command("report", root, "--output", page)
    assert done.exit_code == 1
    (line,) = [line for line in done.stderr.splitlines() if "left out" in line]
    assert line.startswith(f"nucleon: {folder} cannot be read: ")
    text = page.read_text()
    assert "Left out: damaged runs" in text
    assert str(folder) in text
    assert "nucleon reproduce good" in text
    assert "nucleon reproduce hurt" not in text


def test_a_damaged_run_is_measured_again_on_resume(command, runs, tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    cut(runs(tmp_path, "hurt")[0] / "result.json")
    claims = [toy(name="good"), toy(name="hurt")]
    command("reproduce", "--all", "--jobs", "1", "--resume", "--output", tmp_path, claims=claims)
    assert len(runs(tmp_path, "good")) == 1
    assert len(runs(tmp_path, "hurt")) == 2


def test_a_run_of_another_schema_is_named(command, runs, tmp_path, whole):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (runs(tmp_path, "hurt")[0] / "manifest.json").write_text('{"schema": 1}')
    done = command("report", tmp_path, "--output", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "its schema is 1, not 3" in done.stderr


def test_nothing_to_report(command, tmp_path):
    done = command("report", tmp_path / "absent", "--output", tmp_path / "page.html")
    assert done.exit_code == 2
    assert "there are no runs in" in done.stderr
    assert not (tmp_path / "page.html").exists()
