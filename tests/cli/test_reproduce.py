import hashlib
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import nucleon
from nucleon.claims import Progress, Settings
from nucleon.cli import jobs
from nucleon.report.runs import load
from toys import EVIL, fail, toy

# ------------------------------------------------------------------ the paper's figure


def test_quick_run_from_end_to_end(command, runs, tmp_path):
    words = ("fig-ripples", "--quick", "--seeds", 2)
    done = command("reproduce", *words, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    (folder,) = runs(tmp_path, "fig-ripples")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 claim to check, about ")
    assert lines[-2:] == [f"run  {folder}", f"report  {tmp_path / 'report.html'}"]
    assert done.stdout.count("PASS") == 10  # nine checks and the claim

    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["passed"] is True
    options = {"quick": True, "seeds": 2, "first_seed": 0}
    assert manifest["options"] == options
    assert manifest["versions"]["nucleon"] == nucleon.__version__
    assert manifest["command"] == "nucleon reproduce fig-ripples --quick --seeds 2"
    assert 0 < manifest["seconds"] < 600
    assert {"system", "processor", "cores"} <= manifest["machine"].keys()
    texts = {"manifest.json", "trace.jsonl", "result.json"}
    pictures = {"loss-paths.svg", "loss-paths.png"}
    assert {p.name for p in folder.iterdir()} == texts | pictures
    trace = (folder / "trace.jsonl").read_bytes()
    assert folder.name.endswith(hashlib.sha256(trace).hexdigest()[:8])

    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 4
    assert all(len(line["losses"]) == 301 for line in lines)
    assert ET.parse(folder / "loss-paths.svg").getroot().tag.endswith("svg")
    assert (folder / "loss-paths.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "nucleon reproduce fig-ripples --quick" in page


# ------------------------------------------------------------------ exit codes and errors


def test_one_failing_claim_of_several_sets_the_exit_code(command, runs, tmp_path):
    claims = (toy(name="good"), toy(passed=False, name="bad"))
    done = command("reproduce", "--all", "--jobs", "1", "--output", tmp_path, claims=claims)
    assert done.exit_code == 1
    assert done.stdout.startswith("2 claims to check, about 2 s\n")
    assert len(runs(tmp_path, "good")) == len(runs(tmp_path, "bad")) == 1
    assert "1 of 2 claims hold" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fig-riples"], ["no claim 'fig-riples'", "hint: did you mean fig-ripples?"]),
        (["zzz"], ["no claim 'zzz'", "hint: the claims are", "fig-ripples"]),
        (["--quick"], ["no claim was named", "hint: name one of"]),
        (["fig-ripples", "--seeds", "0"], ["--seeds"]),
        (["fig-ripples", "--jobs", "0"], ["jobs"]),
        (["fig-ripples", "--first-seed", "-1"], ["first-seed"]),
        (["fig-ripples", "--bogus"], ["bogus"]),
    ],
)
def test_usage_errors_are_a_sentence_and_exit_code_2(command, tmp_path, arguments, words):
    done = command("reproduce", *arguments, "--output", tmp_path)
    assert done.exit_code == 2
    assert all(w in done.stderr for w in words)
    assert "Traceback" not in done.output
    assert not list(tmp_path.iterdir())


def test_a_claim_that_breaks_is_a_sentence_and_the_others_go_on(command, runs, tmp_path):
    claims = (toy(name="broken", run=fail), toy(name="good"))
    done = command("reproduce", "--all", "--jobs", "1", "--output", tmp_path, claims=claims)
    assert done.exit_code == 2
    assert (
        "nucleon: broken: ZeroDivisionError: by zero\n"
        "  hint: add --debug to see where it happened\n"
    ) in done.stderr
    assert "Traceback" not in done.output
    assert runs(tmp_path, "broken") == []
    assert len(runs(tmp_path, "good")) == 1
    done = command("reproduce", "broken", "--debug", "--output", tmp_path, claims=claims)
    assert isinstance(done.exception, ZeroDivisionError)


# ------------------------------------------------------------------ what is written


def test_runs_never_overwrite_each_other(command, runs, tmp_path):
    for _ in range(3):
        assert command("reproduce", "toy", "--output", tmp_path, claims=[toy()]).exit_code == 0
    assert len(runs(tmp_path)) == 3
    assert all(load(folder).manifest["passed"] for folder in runs(tmp_path))


def test_json_stays_json_whatever_was_measured(command, runs, tmp_path):
    command("reproduce", "toy", "--output", tmp_path, claims=[toy(passed=False)])
    (folder,) = runs(tmp_path)

    def refuse(word):
        raise AssertionError(word)

    result = json.loads((folder / "result.json").read_text(), parse_constant=refuse)
    assert result["checks"][0]["measured"] == "nan"
    record = json.loads((folder / "trace.jsonl").read_text(), parse_constant=refuse)
    assert record == {"seed": 0, "value": "inf"}


def test_names_are_text_on_the_terminal(command, tmp_path):
    done = command("reproduce", "toy", "--output", tmp_path, claims=[toy(words=EVIL)])
    assert done.exit_code == 0, done.output
    assert done.stdout.count(EVIL) == 9  # [bold] is text here, not markup


def test_for_machines(command, runs, tmp_path):
    claims = (toy(name="good"), toy(passed=False, name="bad"), toy(name="broken", run=fail))
    done = command(
        "reproduce", "--all", "--jobs", "1", "--json", "--output", tmp_path, claims=claims
    )
    assert done.exit_code == 2
    answer = json.loads(done.stdout)
    assert answer["report"] == str(tmp_path / "report.html")
    good, bad, broken = answer["runs"]
    assert (good["id"], good["passed"], good["folder"]) == (
        "good",
        True,
        str(runs(tmp_path, "good")[0]),
    )
    assert bad["passed"] is False
    assert bad["checks"][0]["measured"] == "nan"
    assert (broken["passed"], broken["error"]) == (None, "ZeroDivisionError: by zero")


def test_report_writes_the_page_to_the_same_place(command, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = lambda *words: json.loads(command("report", "--json", *words).stdout)["report"]  # noqa: E731
    command("reproduce", "toy", "--json", claims=[toy()])
    made = Path("runs", "report.html").read_text()
    assert where() == str(Path("runs", "report.html"))
    assert Path("runs", "report.html").read_text() == made
    command("reproduce", "toy", "--output", "results", claims=[toy()])
    assert where("results") == str(Path("results", "report.html"))
    (one,) = runs(tmp_path / "results")
    assert where(one) == str(one.parent / "report.html")  # beside a run, not in it
    assert where("runs/toy", "results/toy") == str(Path("runs", "toy", "report.html"))


# ------------------------------------------------------------------ --resume and --jobs


def test_resume_keeps_what_was_checked_with_the_same_options(command, runs, tmp_path):
    claims = (toy(name="first"), toy(passed=False, name="second"))
    go = ("reproduce", "--all", "--jobs", "1", "--output", tmp_path)
    command("reproduce", "first", "--output", tmp_path, claims=claims)
    done = command(*go, "--resume", claims=claims)
    assert "PASS  first, as checked before" in done.stdout
    assert "1 claim to check" in done.stdout
    assert done.exit_code == 1
    assert [len(runs(tmp_path, name)) for name in ("first", "second")] == [1, 1]
    done = command(*go, "--resume", claims=claims)
    assert "all claims are checked already" in done.stdout
    assert done.exit_code == 1  # a failure that is known is still one
    command(*go, "--resume", "--first-seed", 1, claims=claims)  # other options: not the same
    assert [len(runs(tmp_path, name)) for name in ("first", "second")] == [2, 2]
    command(*go, claims=claims)
    assert [len(runs(tmp_path, name)) for name in ("first", "second")] == [3, 3]


def test_resume_does_not_trust_other_code(command, runs, tmp_path, monkeypatch):
    command("reproduce", "toy", "--output", tmp_path, claims=[toy()])
    monkeypatch.setattr("nucleon.report.runs.SOURCE", "other")
    command("reproduce", "toy", "--resume", "--output", tmp_path, claims=[toy()])
    assert len(runs(tmp_path)) == 2


def test_jobs_measure_the_same_beside_each_other(command, runs, tmp_path):
    here = []
    timed = toy(name="timed", run=lambda run: here.append("by itself") or toy().measure(run))
    claims = [
        replace(timed, alone=True),
        toy(name="a"),
        toy(name="b"),
        toy(name="broken", run=fail),
    ]
    done = command("reproduce", "--all", "--jobs", 2, "--output", tmp_path, claims=claims)
    assert done.exit_code == 2
    assert "broken: ZeroDivisionError" in done.stderr
    assert "4 claims to check, about 2 s" in done.stdout  # 3/2 and 1
    assert here == ["by itself"]  # in this process, which could not have been sent elsewhere
    alone = jobs.check(claims[1], Settings(), tmp_path / "alone", Progress(), debug=True)
    for name in "ab":
        (folder,) = runs(tmp_path, name)
        assert folder.name[-8:] == alone.folder.name[-8:]  # the hash of what was measured
