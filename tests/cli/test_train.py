import errno
import hashlib
import html
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import nucleon
from helpers_forks import NUCLEON, Forked
from nucleon import training
from nucleon._files import to_json
from nucleon.cli import train as train_verb
from nucleon.cli import trained
from nucleon.cli.app import app
from nucleon.cli.app import command as verb
from nucleon.cli.console import setting, word_of
from nucleon.report import find, load
from nucleon.training import Checkpoints
from nucleon.training.run import read_log

TINY = (
    *("--task", "text", "--megabytes", "0.02", "--context", "16", "--batch", "4"),
    *("--layers", "1", "--heads", "2", "--width", "16"),
)


@pytest.fixture
def command():
    def call(*arguments):
        return CliRunner().invoke(app, ["train", *map(str, arguments)])

    return call


def test_the_command_as_typed(tmp_path):
    """By the module, interrupted; then by the installed name, which goes on as it was told to."""
    folder = tmp_path / "run"
    words = (*TINY, "--steps", "1000000", "--save-every", "0", "--log-every", "1")
    first = subprocess.Popen(
        (sys.executable, "-m", "nucleon", "train", *words, "--output", folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while first.poll() is None and not read_log(folder / "trace.jsonl"):
        time.sleep(0.01)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    (step,) = Checkpoints(folder / "checkpoints").steps()
    script, *told = shlex.split(err.partition("go on with: ")[2].splitlines()[0])
    installed = Path(sys.executable).with_name(script)
    second = subprocess.run(
        [installed, *told, "--steps", str(step + 2)], capture_output=True, text=True
    )
    assert second.returncode == 0, second.stderr
    assert f"from step {step}," in second.stdout
    assert Checkpoints(folder / "checkpoints").steps()[-1] == step + 2


def test_digits_from_end_to_end(command, tmp_path):
    folder = tmp_path / "run"
    done = command("--steps", 30, "--evaluate-every", 15, "--save-every", 10, "--output", folder)
    assert done.exit_code == 0, done.output
    assert "digits: 8,970 parameters by leon" in done.stdout
    assert "step     15  test loss" in done.stdout
    assert f"folder     {folder}" in done.stdout
    assert "100 %" in done.stderr
    assert Checkpoints(folder / "checkpoints").steps() == [20, 30]
    log = read_log(folder / "trace.jsonl")
    assert [r["step"] for r in log] == [10, 15, 20, 30, 30]

    saved = load(folder)  # as the claims' runs are: every file held to its digest
    manifest, said = saved.manifest, json.loads((folder / "manifest.json").read_text())
    assert said["files"].keys() == {"result.json", "trace.jsonl", "loss.svg", "loss.png"}
    assert (manifest["id"], saved.state, saved.passed) == ("train", "finished", None)
    assert manifest["versions"]["nucleon"] == nucleon.__version__
    assert manifest["options"]["seed"] == 0 and manifest["options"]["steps"] == 30
    assert manifest["options"]["lr"] == 0.02  # that of for_model, which was not said
    assert manifest["seconds"] > 0 and manifest["machine"]["cores"] > 0
    losses, right = saved.result.figures[0].panels
    training_loss, held_out = losses.series
    assert (training_loss.x, held_out.x) == ([10, 20, 30], [15, 30])
    assert training_loss.y == [r["loss"] for r in log if "loss" in r]
    assert right.series[0].y == [r["accuracy"] for r in log if "accuracy" in r]
    rows = dict(saved.result.tables[0].rows)
    assert rows == {
        "steps": "30 of 30",
        "parameters": "8,970",
        "training loss": log[-2]["loss"],
        "held-out loss": log[-1]["test_loss"],
        "held-out accuracy": log[-1]["accuracy"],
    }


def test_a_run_is_where_runs_are_and_its_command_repeats_it(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "it's a text.txt"
    text.write_text("it was the best of times, it was the worst of times. " * 10)
    words = ("--data", text, "--set", "momentum=0.5", "--set", 'method="eigh"', "--tied")
    done = command(*TINY, *words, "--steps", 3, "--log-every", 1)
    assert done.exit_code == 0, done.output
    (first,) = find(tmp_path / "runs")
    assert first.parent == tmp_path / "runs" / "train"
    again = shlex.split(load(first).manifest["command"])
    assert again[:2] == ["nucleon", "train"]
    assert CliRunner().invoke(app, [*again[1:], "--output", "again"]).exit_code == 0
    for file in ("run.json", "trace.jsonl", "result.json", "loss.png"):
        assert (tmp_path / "again" / file).read_bytes() == (first / file).read_bytes()
    words = hashlib.sha256(to_json(asdict(training.run.read_options(first)[0])).encode())
    assert first.name.endswith(words.hexdigest()[:8])


AS_IT_IS = verb("train").make_context("train", ["--task", "digits"])
LEAVES = (
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    st.sampled_from(
        ["true", "null", "None", "1e-3", "nan", "-inf", "[1]", "'a'", " 1", "x=1", "..."]
    ),
)
VALUES = st.recursive(
    st.one_of(*LEAVES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(VALUES)
def test_what_was_set_is_written_as_it_is_read(value):
    options = training.Options("digits", training.Recipe(steps=1), set={"x": value})
    words = shlex.split(trained.command(AS_IT_IS, options, {}))
    said = setting("--set", words[words.index("--set") + 1])
    assert repr(said) == repr(("x", value))  # as nan is not itself, and 1 is True


def test_text_is_written_without_quotes_where_it_is_plain():
    assert [word_of(value) for value in ("eigh", "1", "true", "a\nb")] == [
        *("eigh", "'1'", "'true'", r"'a\nb'")
    ]


def test_a_run_is_in_the_report_whether_it_runs_stopped_or_ended(command, tmp_path):
    """The manifest is there from the start, and what goes on is held to no digest."""
    folder, page, states = tmp_path / "<b>", tmp_path / "page.html", []

    def report():
        done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(page)])
        assert done.exit_code == 0, done.output
        states.append(load(folder).state)
        return page.read_text()

    def watched(run, stop, out):
        assert "running</span>" in report()
        return training.Run.go(run, stop=iter([False] * 2 + [True] * 9).__next__)

    go = ("--resume", "--output", folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_verb, "_go", watched)
        stopped = command(*TINY, "--steps", 9, "--log-every", 1, "--output", folder)
        assert stopped.exit_code == 130
        text = report()
        assert "stopped</span>" in text
        assert f"nucleon train --resume --output &#39;{html.escape(str(folder))}&#39;" in text
        assert "Stopped after step 2 of 9" in text
        assert command(*go).exit_code == 130
    before, earlier = load(folder).manifest, trained._earlier
    with pytest.MonkeyPatch.context() as patched:  # as if it had taken long
        patched.setattr(trained, "_earlier", lambda f: (earlier(f)[0], earlier(f)[1] + 1000.0))
        assert command(*go).exit_code == 0
    text = report()
    assert "nucleon train --task text --optimizer leon --steps 9" in text
    assert "leon on text" in text and "0.02" in text and "<b>" not in text
    after = load(folder).manifest
    assert after["started"] == before["started"]
    assert 1000 < after["seconds"] < 1600  # all parts together
    assert states == ["running", "stopped", "running", "finished"]


def test_a_run_that_was_killed_has_a_manifest_and_one_before_it_a_remedy(command, tmp_path):
    folder = tmp_path / "run"

    def ended(*_):
        raise KeyboardInterrupt  # as a second Ctrl-C, which does not wait

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_verb, "_go", ended)
        assert command(*TINY, "--steps", 2, "--output", folder).exit_code == 130
    assert load(folder).state == "running"
    (folder / "manifest.json").unlink()  # as of an earlier version, or killed before
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "page")])
    assert done.exit_code == 2
    assert f"{folder / 'manifest.json'} cannot be read" in done.stderr
    assert f"go on with: nucleon train --resume --output {folder}" in done.stderr
    assert command("--resume", "--output", folder).exit_code == 0
    assert load(folder).state == "finished"


def test_killed_while_it_is_sealed(command, tmp_path, monkeypatch):
    """Result and figures may be those of the end or not: the manifest vouches for neither yet."""
    folder, go = tmp_path / "run", (*TINY, "--steps", 2, "--log-every", 1)
    assert command(*go, "--output", folder).exit_code == 0
    sealed = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    def ended(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("nucleon.report.runs.draw", ended)
        more = command("--resume", "--output", folder, "--steps", 3)
    assert more.exit_code == 130
    assert load(folder).state == "running"
    assert (folder / "result.json").read_bytes() != sealed["result.json"]
    assert command("--resume", "--output", folder).exit_code == 0
    assert load(folder).state == "finished"
    assert dict(load(folder).result.tables[0].rows)["steps"] == "3 of 3"


@pytest.mark.parametrize("file", ["manifest.json", "result.json", "trace.jsonl", "loss.svg"])
def test_a_damaged_run_is_named_and_mended_by_going_on(command, tmp_path, file):
    folder = tmp_path / "run"
    command(*TINY, "--steps", 2, "--log-every", 1, "--output", folder)
    os.truncate(folder / file, (folder / file).stat().st_size - 9)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "page")])
    assert done.exit_code == 2
    assert f"nucleon: {folder / file} is cut off or was altered" in done.stderr
    assert f"go on with: nucleon train --resume --output {folder}" in done.stderr
    again = command("--resume", "--output", folder)
    assert again.exit_code == 0
    assert f"nucleon: {folder / file} is cut off or was altered" in again.stderr  # not in silence
    assert load(folder).state == "finished"
    assert "altered" not in command("--resume", "--output", folder).stderr


def test_the_help_has_the_rate_of_for_model(command):
    _, rest = nucleon.Leon.for_model(training.MLP()).param_groups
    words = command("--help").stdout.replace("│", " ").split()
    assert f"no hidden matrix; {rest['lr']}." in " ".join(words)


def test_json_is_all_there_is_on_stdout(command, tmp_path):
    done = command(*TINY, "--steps", 3, "--json", "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["steps"] == 3
    assert found["finished"]
    assert found["figures"]["test_loss"] > 0
    assert found["folder"] == str(tmp_path / "run")


def test_a_run_is_resumed_with_its_own_options(command, tmp_path):
    folder = tmp_path / "run"
    assert command(*TINY, "--steps", 3, "--output", folder).exit_code == 0
    done = command("--resume", "--output", folder, "--steps", 5)
    assert done.exit_code == 0, done.output
    assert "from step 3, 5 steps" in done.stdout
    assert Checkpoints(folder / "checkpoints").steps() == [3, 5]


def test_a_pair_that_is_said_again_is_that_of_the_run(command, tmp_path):
    """In the folder it is a list."""
    folder, said = tmp_path / "run", ("--optimizer", "adamw", "--set", "betas=0.8,0.9")
    assert command(*TINY, *said, "--steps", 3, "--output", folder).exit_code == 0
    done = command("--resume", *said, "--output", folder, "--steps", 5)
    assert done.exit_code == 0, done.output
    other = command("--resume", *said[:3], "betas=0.7,0.9", "--output", folder)
    assert other.exit_code == 2 and "the run was begun with set" in other.stderr


def test_a_number_that_json_lacks_is_a_number_again_when_a_run_goes_on(tmp_path):
    chosen = {"limit": float("inf"), "least": float("-inf"), "method": "eigh"}
    options = training.Options("digits", training.Recipe(steps=1), set=chosen)
    (tmp_path / "run.json").write_text(to_json({"options": asdict(options), "data": "digits"}))
    assert training.run.read_options(tmp_path)[0] == options


MINE = """
from pathlib import Path
import nucleon
Path(__file__).with_name("executed").touch()
class Mine(nucleon.Muon):
    pass
"""


def test_code_that_only_the_folder_names_is_not_run(command, tmp_path):
    """A file of a run may be forged; the command line is the user's."""
    folder, file, trace = tmp_path / "run", tmp_path / "mine.py", tmp_path / "executed"
    file.write_text(MINE)
    assert command(*TINY, "--steps", 2, "--output", folder).exit_code == 0
    facts = json.loads((folder / "run.json").read_text())
    facts["options"]["optimizer"] = f"{file}:Mine"
    (folder / "run.json").write_text(json.dumps(facts))
    refused = command("--resume", "--output", folder)
    assert refused.exit_code == 2
    assert f"has the optimizer '{file}:Mine', which is code to run" in refused.stderr
    assert f"repeat --optimizer '{file}:Mine' if you trust that file" in refused.stderr
    assert not trace.exists()


def test_an_optimizer_of_ones_own_goes_on_when_it_is_repeated(command, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "mine.py"
    file.write_text(MINE)
    mine = ("--optimizer", f"{file}:Mine")
    assert command(*TINY, *mine, "--steps", 2, "--output", folder).exit_code == 0
    done = command("--resume", *mine, "--steps", 4, "--output", folder)
    assert done.exit_code == 0, done.output
    assert "from step 2" in done.stdout
    run = training.resume(folder, {"optimizer": f"{file}:Mine"})
    again = shlex.split(train_verb._resuming(run, "cpu", None))
    assert command(*again[2:]).exit_code == 0  # the command that is suggested is one that works


def test_a_lengthened_run_that_is_broken_off_goes_on_to_its_new_end(command, tmp_path):
    folder = tmp_path / "run"
    assert command(*TINY, "--steps", 2, "--output", folder).exit_code == 0
    training.resume(folder, {"steps": 6}).go(stop=iter([False, False, True]).__next__)
    done = command("--resume", "--output", folder)
    assert done.exit_code == 0, done.output
    assert "from step 4, 6 steps" in done.stdout
    assert Checkpoints(folder / "checkpoints").steps() == [4, 6]
    fewer = command("--resume", "--output", folder, "--steps", 5)
    assert fewer.exit_code == 2
    assert "has done 6 steps already, --steps is 5" in fewer.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence", "hint"),
    [
        (["--optimizer", "lean"], "there is no optimizer 'lean'; did you mean leon?", "--help"),
        (["--resume"], "--resume needs a folder", "--output"),
        (["--set", "momentum"], "--set is 'momentum'", "NAME=VALUE"),
        (["--set", "nothing=1"], "'nothing'", "--help"),
        (["--data", "x.txt"], "--data is a text, the task is digits", "--task text"),
        (
            ["--task", "text", "--data", "/no/such/file"],
            "/no/such/file: there is no such file",
            "check the path",
        ),
        (["--steps", 0], "steps must be an integer ≥ 1", "--help"),
        (["--task", "text", "--width", 30], "multiple of 2·heads", "--help"),
        (["--optimizer", "adamw", "--aux-lr", 0.1], "one rate for all", "--help"),
    ],
)
def test_errors_are_a_sentence_and_a_hint(command, tmp_path, arguments, sentence, hint):
    place = [] if arguments == ["--resume"] else ["--output", tmp_path / "run"]
    done = command(*arguments, *place)
    assert done.exit_code == 2, done.output
    said = done.stderr.replace("\n", " ")
    assert sentence in said
    assert hint in said
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_a_folder_in_use_and_other_options_are_refused(command, tmp_path):
    folder = tmp_path / "run"
    command(*TINY, "--steps", 2, "--output", folder)
    again = command(*TINY, "--output", folder)
    assert again.exit_code == 2
    assert "holds a run already" in again.stderr
    other = command("--resume", "--output", folder, "--seed", 5)
    assert other.exit_code == 2
    assert "begun with seed = 0, not 5" in other.stderr


def test_a_read_only_folder_is_a_sentence(command, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = command(*TINY, "--steps", 2, "--output", tmp_path / "file" / "run")
    assert done.exit_code == 2
    assert "Not a directory" in done.stderr


def test_a_full_disk_is_named_and_the_run_goes_on(command, tmp_path, monkeypatch):
    def full(checkpoints, step, state):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(checkpoints, step, state)

    folder, save = tmp_path / "run", Checkpoints.save
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", full)
        done = command(*TINY, "--steps", 6, "--save-every", 2, "--output", folder)
    assert done.exit_code == 2
    assert f"{folder}: No space left on device" in done.stderr
    assert f"then go on with: nucleon train --resume --output {folder}" in done.stderr
    assert load(folder).state == "running"
    done = command("--resume", "--output", folder)
    assert done.exit_code == 0, done.output
    assert "from step 2, 6 steps" in done.stdout
    assert load(folder).state == "finished"


def test_a_damaged_checkpoint_is_told(command, tmp_path):
    folder = tmp_path / "run"
    command(*TINY, "--steps", 4, "--save-every", 2, "--output", folder)
    os.truncate(folder / "checkpoints" / "step-00000004" / "state.pt", 50)
    done = command("--resume", "--output", folder)
    assert done.exit_code == 0, done.output
    assert "checkpoint of step 4 is damaged (state.pt is not what was written)" in done.stderr
    assert "from step 2" in done.stdout


def test_a_loss_that_is_not_finite_ends_the_run(command, tmp_path):
    done = command(
        *TINY, "--optimizer", "sgd", "--lr", 1e30, "--log-every", 1, "--output", tmp_path / "run"
    )
    assert done.exit_code == 2
    assert "the loss is nan after step" in done.stderr
    assert "lower --lr" in done.stderr
    saved = load(tmp_path / "run")
    assert saved.state == "stopped"
    assert "the loss is nan after step" in saved.result.notes[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_says_how_to_go_on(command, tmp_path, number):
    folder = tmp_path / "run"
    words = (*TINY, "--steps", 1000000, "--save-every", 0, "--log-every", 1, "--output", folder)
    process = Forked(NUCLEON, "train", *words)
    while process.poll() is None and not read_log(folder / "trace.jsonl"):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130, err
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert f"stopped after step {step} of 1000000, and saved" in err
    assert load(folder).state == "stopped"
    assert load(folder).result.figures
    assert f"go on with: nucleon train --resume --output {folder}" in err
    assert "Traceback" not in err
    done = command("--resume", "--output", folder, "--steps", step + 2)
    assert done.exit_code == 0, done.output
    assert f"from step {step}," in done.stdout
