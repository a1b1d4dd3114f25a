import dataclasses
import datetime
import hashlib
import html.parser
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

import nucleon
from nucleon import cli
from nucleon.cli import reproduce as verb
from nucleon.cli.app import app
from nucleon.experiments import (
    CLAIMS,
    Check,
    Claim,
    Figure,
    Panel,
    Result,
    Series,
    Table,
    fig_ripples,
)

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
EVIL = '<script>alert("x")</script> & [bold]é'


def toy(passed=True, name="toy", words="words"):
    """A claim that is measured at once, and says `words` wherever it can."""
    series = Series(words, [1.0, 2.0], [3.0, 1.0], [2.0, 0.5], [4.0, 1.5])

    def run(settings, progress):
        progress.begin(2, "units")
        progress.advance(2, words)
        return Result(
            checks=(Check(words, 1.0 if passed else float("nan"), "≤", 1.0),),
            tables=(Table(words, (words, "value"), ((words, 1.25),)),),
            figures=(Figure("toy-figure", words, words, (Panel(words, words, words, (series,)),)),),
            records=({"seed": settings.first_seed, "value": float("inf")},),
            notes=(words,),
        )

    return Claim(name, words, words, words, words, run=run, seconds=1, quick_seconds=1)


@pytest.fixture
def command(monkeypatch):
    def call(*arguments, claims=()):
        if claims:
            monkeypatch.setattr(verb, "CLAIMS", {c.id: c for c in claims})
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return call


def runs(root, name="toy"):
    return sorted(p for p in (root / name).iterdir() if not p.name.startswith("."))


# ------------------------------------------------------------------ the paper's figure


def test_quick_run_from_end_to_end(command, tmp_path):
    done = command("reproduce", "fig-ripples", "--quick", "--output", tmp_path)
    assert done.exit_code == 0, done.output
    (folder,) = runs(tmp_path, "fig-ripples")
    assert done.stdout.splitlines()[-1] == f"report  {folder / 'report.html'}"
    assert str(folder / "loss-paths.svg") in done.stdout
    assert done.stdout.count("PASS") == 6  # five checks and the claim
    assert "100 %" in done.stderr

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["passed"] is True
    assert manifest["options"] == {"quick": True, "seeds": None, "first_seed": 0}
    assert manifest["versions"]["nucleon"] == nucleon.__version__
    assert manifest["command"] == "nucleon reproduce fig-ripples --quick"
    assert 0 < manifest["seconds"] < 600
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    del files["manifest.json"]
    assert manifest["files"] == files
    assert set(files) == {"trace.jsonl", "report.html"} | {
        f"{figure}.{kind}" for figure in ("loss-paths", "by-rate") for kind in ("svg", "png")
    }
    assert folder.name.endswith(files["trace.jsonl"][:8])

    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 4 * fig_ripples.QUICK_SEEDS
    assert all(len(line["loss"]) == 301 for line in lines)
    for figure in ("loss-paths", "by-rate"):
        assert ET.parse(folder / f"{figure}.svg").getroot().tag.endswith("svg")
        assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG")


def test_an_impossible_tolerance_fails(command, tmp_path, monkeypatch):
    monkeypatch.setattr(fig_ripples, "STEPS", 3)
    monkeypatch.setattr(fig_ripples, "UPWARD_RATIO", float("inf"))
    done = command("reproduce", "fig-ripples", "--quick", "--output", tmp_path)
    assert done.exit_code == 1
    assert "FAIL" in done.stdout
    (folder,) = runs(tmp_path, "fig-ripples")  # a failure is a result, and is kept
    assert json.loads((folder / "manifest.json").read_text())["passed"] is False


# ------------------------------------------------------------------ exit codes and errors


def test_one_failing_claim_of_several_sets_the_exit_code(command, tmp_path):
    claims = (toy(name="good"), toy(passed=False, name="bad"))
    done = command("reproduce", "--all", "--output", tmp_path, claims=claims)
    assert done.exit_code == 1
    assert len(runs(tmp_path, "good")) == len(runs(tmp_path, "bad")) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fig-riples"], ["no claim 'fig-riples'", "hint: did you mean fig-ripples?"]),
        (["zzz"], ["no claim 'zzz'", "hint: the claims are", "fig-ripples"]),
        (["--quick"], ["no claim was named", "hint: name one of"]),
        (["fig-ripples", "--seeds", "0"], ["--seeds is 0", "hint: pass a number from 1"]),
        (["fig-ripples", "--seeds", "1001"], ["--seeds is 1001", "to 1000"]),
        (["fig-ripples", "--seeds", "many"], ["seeds"]),
        (["fig-ripples", "--bogus"], ["bogus"]),
    ],
)
def test_usage_errors_are_a_sentence_and_exit_code_2(command, tmp_path, arguments, words):
    done = command("reproduce", *arguments, "--output", tmp_path)
    assert done.exit_code == 2
    assert all(w in done.stderr for w in words)
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_cannot_be_is_named_before_anything_runs(command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    reached = []
    claim = dataclasses.replace(toy(), run=lambda *_: reached.append(1))
    output = tmp_path / "file" / "runs"
    done = command("reproduce", "toy", "--output", output, claims=[claim])
    assert done.exit_code == 2
    assert str(output) in done.stderr
    assert "Not a directory" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.output
    assert not reached


def test_a_full_disk_costs_the_files_not_the_answer(command, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("nucleon.report.runs.draw", full)
    done = command("reproduce", "toy", "--output", tmp_path, claims=[toy()])
    assert done.exit_code == 2
    assert "PASS" in done.stdout
    assert "somewhere: No space left on device" in done.stderr
    assert not list((tmp_path / "toy").iterdir())


def test_an_unexpected_error_is_a_sentence_unless_debugging(command, tmp_path):
    def run(*_):
        raise ZeroDivisionError("by zero")

    claim = dataclasses.replace(toy(), run=run)
    done = command("reproduce", "toy", "--output", tmp_path, claims=[claim])
    assert done.exit_code == 2
    assert done.stderr == (
        "nucleon: ZeroDivisionError: by zero\n  hint: add --debug to see where it happened\n"
    )
    assert not list((tmp_path / "toy").iterdir())
    done = command("reproduce", "toy", "--debug", "--output", tmp_path, claims=[claim])
    assert isinstance(done.exception, ZeroDivisionError)


# ------------------------------------------------------------------ what is written


def test_runs_never_overwrite_each_other(command, tmp_path, monkeypatch):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)

    monkeypatch.setattr(verb, "datetime", Clock)
    for _ in range(3):  # at one time, with one trace: one name
        assert command("reproduce", "toy", "--output", tmp_path, claims=[toy()]).exit_code == 0
    assert len(runs(tmp_path)) == 3
    assert all((folder / "report.html").exists() for folder in runs(tmp_path))


def test_json_stays_json_whatever_was_measured(command, tmp_path):
    command("reproduce", "toy", "--output", tmp_path, claims=[toy(passed=False)])
    (folder,) = runs(tmp_path)

    def refuse(word):
        raise AssertionError(word)

    manifest = json.loads((folder / "manifest.json").read_text(), parse_constant=refuse)
    assert manifest["checks"][0]["measured"] == "nan"
    record = json.loads((folder / "trace.jsonl").read_text(), parse_constant=refuse)
    assert record == {"seed": 0, "value": "inf"}


def test_names_are_escaped_in_the_page_and_on_the_terminal(command, tmp_path):
    done = command("reproduce", "toy", "--output", tmp_path, claims=[toy(words=EVIL)])
    assert done.exit_code == 0, done.output
    assert done.stdout.count(EVIL) == 9  # [bold] is text here, not markup
    (folder,) = runs(tmp_path)
    page = (folder / "report.html").read_text()
    tags, text = [], []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.handle_data = text.append
    parser.feed(page)
    assert "script" not in tags
    assert "svg" in tags
    assert "".join(text).count(EVIL) >= 6
    assert "http" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")


def test_the_page_names_the_command_that_made_it(command, tmp_path):
    arguments = ("toy", "--quick", "--seeds", 4, "--first-seed", 9)
    command("reproduce", *arguments, "--output", tmp_path, claims=[toy()])
    (folder,) = runs(tmp_path)
    again = "nucleon reproduce toy --quick --seeds 4 --first-seed 9"
    assert again in (folder / "report.html").read_text()


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
def test_a_run_that_is_killed_leaves_no_folder_under_a_final_name(tmp_path):
    words = [sys.executable, "-m", "nucleon", "reproduce", "fig-ripples", "--output", tmp_path]
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=-3)
    parent, deadline = tmp_path / "fig-ripples", time.monotonic() + 120
    try:
        while not (parent.exists() and list(parent.iterdir())):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(parent.iterdir())  # the draft is there
    assert runs(tmp_path, "fig-ripples") == []


# ------------------------------------------------------------------ the other verbs


def test_version(command):
    assert command("--version").stdout == f"nucleon {nucleon.__version__}\n"


def test_list_names_claims_and_optimizers(command):
    done = command("list")
    assert all(word in done.stdout for word in (*CLAIMS, "Muon", "Pion", "Leon", "polar(Ĝ)"))
    assert "polar(Ĝ)" not in command("list", "claims").stdout
    assert "fig-ripples" not in command("list", "optimizers").stdout
    assert command("list", "nonsense").exit_code == 2


def test_a_missing_extra_is_named_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "nucleon: the command line needs rich, which the extra [cli] brings: "
        "pip install 'nucleon-optim[cli]'\n"
    )


def test_the_library_does_not_import_the_command_lines_packages():
    code = (
        "import sys, nucleon, nucleon.experiments, nucleon.problems;"
        "print([m for m in ('typer', 'rich', 'matplotlib', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
