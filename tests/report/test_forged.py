"""Runs that anybody may have written: one of them is left out with a line, the others are shown."""

import copy
import hashlib
import json
import os
import shutil
import signal
import string
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from nucleon._files import to_json
from nucleon.cli.app import app
from nucleon.report import DamagedRunError, load, render
from nucleon.report.overview import CURVES, overview
from nucleon.report.runs import own_digest
from nucleon.report.untrusted import DEEPEST, LARGEST, LARGEST_READ

posix = pytest.mark.skipif(os.name == "nt", reason="needs pipes and links")


@pytest.fixture(autouse=True)
def patience():
    """A reader that waits for a pipe must not make the tests wait."""
    if hasattr(signal, "alarm"):
        signal.alarm(120)
        yield
        signal.alarm(0)
    else:
        yield


@pytest.fixture
def forged(some_runs, tmp_path):
    """Copies of a good run and of one to be forged, in a folder of runs."""
    for name in ("good", "bad"):
        shutil.copytree(some_runs[0].folder, tmp_path / "runs" / name)
    return tmp_path / "runs" / "bad"


def edit(folder, file, change):
    """Change a JSON file of a run, and all digests with it, as a forger would."""
    value = json.loads((folder / file).read_text())
    value = change(value) or value
    (folder / file).write_text(value if isinstance(value, str) else json.dumps(value))
    seal(folder)


def seal(folder, names=None):
    manifest = json.loads((folder / "manifest.json").read_text())
    if isinstance(manifest.get("files"), dict):
        for name in manifest["files"] if names is None else names:
            if (folder / name).is_file():
                content = (folder / name).read_bytes()
                manifest["files"][name] = hashlib.sha256(content).hexdigest()
    manifest["digest"] = own_digest(manifest)
    (folder / "manifest.json").write_text(to_json(manifest))


def report(folder, *words):
    page = folder.parent / "page.html"
    return CliRunner().invoke(app, ["report", str(folder), "--output", str(page), *words])


def left_out(folder, words, file="manifest.json"):
    """The report names the file and why, in one line of the terminal and of the page."""
    done = report(folder.parent)
    assert done.exit_code == 1, done.output
    line = next(line for line in done.stderr.splitlines() if "left out" in line)
    assert line.startswith(f"nucleon: {folder / file} ")
    assert words in line and len(line) < 600
    text = (folder.parents[1] / "page.html").read_text()
    assert "Left out: damaged runs" in text
    assert str(folder / file) in text
    assert text.count("<article") == 1
    assert "Traceback" not in done.output


def test_a_forger_can_seal_what_is_well_formed(forged):
    """Digests are no signatures: what follows is refused for its form."""
    edit(forged, "result.json", lambda r: r["notes"].append("forged"))
    assert "forged" in load(forged).result.notes


# ------------------------------------------------------------------ fields


@pytest.mark.parametrize("name", ["id", "title", "seconds", "started", "options", "machine"])
def test_a_missing_field(forged, name):
    edit(forged, "manifest.json", lambda m: m.pop(name) and None)
    left_out(forged, f"has no {name!r}")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seconds", "long", "has text as 'seconds', not a whole number or a number"),
        ("seconds", True, "has true or false as 'seconds'"),
        ("seconds", 1e300, "has no length of time as 'seconds'"),
        ("seconds", 10**400, "has a number as 'seconds' that is too large"),
        ("expected", -1, "has no length of time as 'expected'"),
        ("started", "yesterday", "has no date as 'started'"),
        ("options", [], "has a list as 'options', not an object"),
        ("machine", {}, "has no 'system'"),
        ("versions", {"torch": 2}, "has a whole number as 'torch', not text"),
        ("files", {"absent": None}, "has null as 'absent', not text"),
        ("state", "asleep", "has 'asleep' as 'state', which is none of running"),
        ("schema", 10**30, "is of another version"),
        ("schema", [2], "has a list as 'schema'"),
    ],
)
def test_a_mistyped_field(forged, name, value, words):
    edit(forged, "manifest.json", lambda m: m.update({name: value}))
    left_out(forged, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("tables") and None, "has no 'tables'"),
        (lambda r: r["checks"][0].update(relation="~"), "has '~' as 'relation'"),
        (lambda r: r["checks"][0].update(measured="much"), "has text as 'measured'"),
        (lambda r: r["checks"].append(7), "has a whole number where an object"),
        (lambda r: r["tables"][0]["rows"][0].append(None), "has null as 'cell of a table'"),
        (lambda r: r["tables"][0]["rows"][0].append(10**400), "that is too large"),
        (lambda r: r["figures"][0].update(name="../x"), "figure '../x' without its drawing"),
        (lambda r: r["figures"][0]["panels"][0].update(x_scale="up"), "has 'up' as 'x_scale'"),
        (lambda r: r["figures"][0]["panels"][0]["series"][0]["x"].pop() and None, "differ in"),
        (lambda r: r["figures"][0]["panels"][0]["series"][0].update(style=0.5), "as 'style'"),
        (lambda r: r["notes"].append(1), "has more than text in 'notes'"),
        (lambda _: "[]", "is a list, not an object"),
        (lambda _: '{"checks": NaN}', "is cut off or was altered"),
        (lambda _: '{"checks": "\\ud800"}', "is cut off or was altered"),
        (lambda _: '{"checks": ' + "9" * 5000 + "}", "is cut off or was altered"),
        (lambda _: "[" * 200_000, f"is nested more than {DEEPEST} deep"),
    ],
)
def test_a_result_that_is_none(forged, change, words):
    edit(forged, "result.json", change)
    left_out(forged, words, "result.json")


@pytest.mark.parametrize("depth", [DEEPEST + 1, 500, 100_000])
def test_deep_nesting(forged, depth):
    text = (forged / "manifest.json").read_text()
    deep = '{"a": ' * depth + "0" + "}" * depth
    (forged / "manifest.json").write_text(
        text.replace('"options": {', f'"deep": {deep}, "options": {{')
    )
    left_out(forged, f"is nested more than {DEEPEST} deep")


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.json", "..", "a/b", "a\\b", "", "/etc/hostname", "c:outside.json", "a\0"),
        *("\x1b[2J\nnucleon: all is well", "../" * 50_000, "a" * 50_000),
    ],
)
def test_no_file_outside_the_folder_is_read(forged, name):
    outside = forged.parent / "outside.json"
    shutil.copy(forged / "result.json", outside)
    digest = hashlib.sha256(outside.read_bytes()).hexdigest()  # it would be taken if it were read
    manifest = json.loads((forged / "manifest.json").read_text())
    manifest["files"][name] = digest
    (forged / "manifest.json").write_text(json.dumps(manifest))
    seal(forged, [])
    left_out(forged, f"names {name[:40]!r}, which is no file in its folder")


@posix
@pytest.mark.parametrize("file", ["manifest.json", "result.json", "trace.jsonl"])
def test_a_link_is_not_followed(forged, file):
    outside = shutil.move(forged / file, forged.parents[1] / file)
    (forged / file).symlink_to(outside)
    left_out(forged, "is a link", file)


@posix
@pytest.mark.parametrize("file", ["manifest.json", "result.json", "trace.jsonl", "toy.svg"])
def test_a_pipe_is_not_waited_for(forged, file):
    (forged / file).unlink()
    os.mkfifo(forged / file)
    left_out(forged, "is not a plain file", file)


@posix
def test_nobody_is_sent_to_options_that_are_a_pipe(forged):
    (forged / "manifest.json").unlink()
    os.mkfifo(forged / "run.json")
    assert "--resume" not in report(forged.parent).stderr


@pytest.mark.parametrize("file", ["manifest.json", "result.json"])
def test_a_folder_in_the_place_of_a_file(forged, file):
    (forged / file).unlink()
    (forged / file).mkdir()
    left_out(forged, "is not a plain file", file)


@posix
def test_a_folder_whose_name_a_terminal_would_act_upon(forged):
    folder = forged.rename(forged.with_name("bad\x1b[2J\nnucleon: all is well"))
    (folder / "result.json").unlink()
    (folder / "run.json").write_text("{}")
    done = report(folder.parent)
    assert done.exit_code == 1, done.output
    assert "\x1b" not in done.output
    assert "bad\\x1b[2J\\nnucleon: all is well/result.json cannot be read" in done.stderr
    assert "hint: rename its folder" in done.stderr


@posix
@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_whose_name_is_no_text(forged, whole):
    try:
        folder = forged.rename(os.fsdecode(os.fsencode(forged) + b"\xff"))
    except OSError:
        pytest.skip("the file system takes text alone")
    if not whole:
        (folder / "result.json").unlink()
    done = report(forged.parent, "--json")
    assert done.exit_code == 1, done.output
    assert r"bad\udcff/manifest.json lies in a folder whose name is not UTF-8; that" in done.stderr
    assert len(json.loads(done.stdout)["runs"]) == 1


def barred(folder, monkeypatch):
    """Let nobody look into a folder, not even root, whom its mode does not bind."""
    folder.chmod(0)
    if os.geteuid():
        return

    def refusing(call):
        def guarded(path, *rest, **options):
            if not isinstance(path, int) and os.fspath(path).startswith(str(folder) + "/"):
                raise PermissionError(13, "Permission denied", path)
            return call(path, *rest, **options)

        return guarded

    def lists(call):
        def guarded(path=".", *rest):
            if os.fspath(path) == str(folder):
                raise PermissionError(13, "Permission denied", path)
            return call(path, *rest)

        return guarded

    may = os.access
    for name in ("open", "stat", "lstat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, lists(getattr(os, name)))
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and may(path, mode))


@posix
@pytest.mark.parametrize("name", ["bad", "20260102-000000-0123abcd"])
def test_a_folder_that_lets_nobody_look(forged, monkeypatch, name):
    folder = forged.rename(forged.with_name(name))
    barred(folder, monkeypatch)
    try:
        left_out(folder, "cannot be read: Permission denied")
    finally:
        monkeypatch.undo()
        folder.chmod(0o755)


def test_what_is_not_shown_is_not_held_in_memory(forged):
    with (forged / "zeros").open("wb") as opened:
        opened.truncate(1 << 26)
    manifest = json.loads((forged / "manifest.json").read_text())
    manifest["files"]["zeros"] = hashlib.sha256(bytes(1 << 26)).hexdigest()
    (forged / "manifest.json").write_text(json.dumps(manifest))
    seal(forged, [])
    tracemalloc.start()
    try:
        load(forged)
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("file", ["manifest.json", "result.json", "toy.svg"])
def test_what_is_held_in_memory_is_not_long(forged, file):
    with (forged / file).open("ab") as opened:
        opened.truncate(LARGEST_READ + 1)
    left_out(forged, f"has {LARGEST_READ + 1} bytes", file)


def test_an_endless_file(forged):
    with (forged / "trace.jsonl").open("ab") as opened:
        opened.truncate(LARGEST + 1)  # sparse: it takes no room
    left_out(forged, f"has {LARGEST + 1} bytes", "trace.jsonl")


def test_a_result_that_is_not_listed(forged):
    edit(forged, "manifest.json", lambda m: m["files"].pop("result.json") and None)
    left_out(forged, "is not among the files", "result.json")


# ------------------------------------------------------------------ anything at all

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**40), 2**63])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["nan", "inf", "-inf", "\ud800", "../x", "\x1b[2J", "<script>"])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(string.ascii_lowercase, max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value, path=()):
    """Every place in a JSON value that can be changed."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def mutated(draw, original):
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        if not found:
            break
        *path, last = draw(st.sampled_from(found))
        parent = value
        for key in path:
            parent = parent[key]
        if draw(st.booleans()) and isinstance(parent, dict):
            del parent[last]
        else:
            parent[last] = draw(values)
    return value


def as_training(run):
    figures = tuple(replace(figure, name=CURVES) for figure in run.result.figures)
    manifest = {**run.manifest, "id": "train"}
    return replace(run, manifest=manifest, result=replace(run.result, figures=figures))


@pytest.mark.parametrize("file", ["manifest.json", "result.json"])
def test_whatever_is_in_a_run_it_is_shown_or_named(some_runs, tmp_path_factory, file):
    source = some_runs[0].folder
    folder = tmp_path_factory.mktemp("mutants") / "bad"
    shutil.copytree(source, folder)
    original = json.loads((source / file).read_text())
    outcomes = set()

    @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutated(original))
    def check(value):
        shutil.copy(source / "manifest.json", folder / "manifest.json")
        text = json.dumps(value)
        (folder / file).write_text(text)
        try:
            if file == "manifest.json":
                value["digest"] = own_digest(value)
                (folder / file).write_text(to_json(value))
            else:
                seal(folder, [file])
        except ValueError:
            pass  # half a character: nobody can seal that
        try:
            found = load(folder)
        except DamagedRunError as error:
            outcomes.add("named")
            assert str(error).startswith(str(folder))
            assert "\n" not in str(error) and "\x1b" not in str(error)
        else:
            outcomes.add("shown")
            assert "<script>alert" not in render([some_runs[0], found])
            figure, table = overview([as_training(some_runs[0]), as_training(found)]) or (
                None,
                None,
            )
            assert figure is None or len(table.rows) == 2

    check()
    assert outcomes == {"named", "shown"}
