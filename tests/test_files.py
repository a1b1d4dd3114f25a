"""One writer of whole files and one JSON for the package."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nucleon._files import to_json, write_whole
from nucleon.claims import Progress, Settings
from nucleon.cli.jobs import check
from toys import toy


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, "één")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_what_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path, write = tmp_path / "file", Path.write_bytes
    write_whole(path, "old")

    def broken(path, content):
        write(path, content[:2])
        raise ZeroDivisionError

    monkeypatch.setattr(Path, "write_bytes", broken)
    with pytest.raises(ZeroDivisionError):
        write_whole(path, "new and long")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_whole(tmp_path / "folder", "text")
    assert caught.value.filename == str(tmp_path / "folder")


# A child dies at the n-th thing it does to the file system, as audit events tell, for every n.
DYING = """
import os, sys
from pathlib import Path
from nucleon._files import write_whole

def child(path, fatal):
    seen = 0
    def hook(event, _):
        nonlocal seen
        seen += event in {"open", "os.rename", "os.remove"}
        if seen == fatal:
            os._exit(9)
    sys.addaudithook(hook)
    write_whole(path, "new" * 1000)
    os._exit(0)

path, fatal, status = Path(sys.argv[1]), 0, 9
while status:
    fatal += 1
    write_whole(path, "old")
    pid = os.fork() or child(path, fatal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(path.read_text())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_writer_may_die_at_any_moment(tmp_path):
    words = [sys.executable, "-c", DYING, str(tmp_path / "file")]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) > 4
    assert set(found) == {"old", "new" * 1000}
    assert found == sorted(found, reverse=True)  # old before the rename, new after it


def publish_a_run(root):
    check(toy(name=root.name), Settings(), root.parent, Progress(), debug=True)


@pytest.mark.skipif(os.name == "nt", reason="opens folders")
@pytest.mark.parametrize(
    "write",
    [lambda folder: write_whole(folder / "file", "text"), publish_a_run],
)
def test_after_a_rename_the_disk_holds_the_new_name(tmp_path, monkeypatch, write):
    folder, held = tmp_path / "folder", []

    def fsync(opened):
        if folder.exists() and os.path.samestat(os.fstat(opened), folder.stat()):
            held.append(sorted(p.name for p in folder.iterdir()))

    monkeypatch.setattr(os, "fsync", fsync)
    write(folder)
    assert held[-1] == sorted(p.name for p in folder.iterdir())
    assert len(held[0]) == 1 and not held[0][0].startswith(".")  # at once, before anything else


def test_json_has_words_for_what_it_has_no_numbers_for():
    value = {"a": [math.inf, -math.inf, (math.nan, 1.5)], "é": None}
    assert to_json(value) == '{"a": ["inf", "-inf", ["nan", 1.5]], "é": null}'
