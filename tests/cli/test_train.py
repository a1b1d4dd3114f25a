import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from nucleon import training
from nucleon.cli.app import app
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


def test_digits_from_end_to_end(command, tmp_path):
    folder = tmp_path / "run"
    done = command("--steps", 30, "--evaluate-every", 15, "--save-every", 10, "--output", folder)
    assert done.exit_code == 0, done.output
    assert "digits: 8,970 parameters by leon" in done.stdout
    assert "step     15  test loss" in done.stdout
    assert f"folder     {folder}" in done.stdout
    assert "100 %" in done.stderr
    assert Checkpoints(folder / "checkpoints").steps() == [20, 30]
    assert [r["step"] for r in read_log(folder / "log.jsonl")] == [10, 15, 20, 30, 30]


def test_json_is_all_there_is_on_stdout(command, tmp_path):
    done = command(*TINY, "--steps", 3, "--json", "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["steps"] == 3
    assert found["finished"]
    assert found["figures"]["test_loss"] > 0
    assert found["folder"] == str(tmp_path / "run")


def test_options_come_from_a_file_and_flags_go_before_it(command, tmp_path):
    source = tmp_path / "novel.txt"
    source.write_text("it was the best of times, it was the worst of times. " * 10)
    config = tmp_path / "run.toml"
    config.write_text(
        f'task = "text"\ndata = "{source}"\ntokens = "bpe"\nvocab = 270\ncontext = 8\nheads = 2\n'
        'width = 16\nlayers = 1\nsteps = 9\noptimizer = "muon"\nset = ["momentum=0.5"]\n'
    )
    done = command("--config", config, "--steps", 2, "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    options = json.loads((tmp_path / "run" / "run.json").read_text())["options"]
    assert options["recipe"]["steps"] == 2
    assert options["set"] == {"momentum": 0.5}
    assert (options["optimizer"], options["vocabulary"]) == ("muon", 270)
    state = Checkpoints(tmp_path / "run" / "checkpoints").load(2)
    assert state["optimizer"]["param_groups"][0]["momentum"] == 0.5


def test_a_run_is_resumed_with_its_own_options(command, tmp_path):
    folder = tmp_path / "run"
    assert command(*TINY, "--steps", 3, "--output", folder).exit_code == 0
    done = command("--resume", "--output", folder, "--steps", 5)
    assert done.exit_code == 0, done.output
    assert "from step 3, 5 steps" in done.stdout
    assert Checkpoints(folder / "checkpoints").steps() == [3, 5]


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
        (["--optimizer", "lean"], "there is no optimizer 'lean'; take leon", "--help"),
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
    done = command("--resume", "--output", folder)
    assert done.exit_code == 0, done.output
    assert "from step 2, 6 steps" in done.stdout


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_and_says_how_to_go_on(command, tmp_path, number):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        (
            *(sys.executable, "-m", "nucleon", "train", *TINY, "--steps", "1000000"),
            *("--save-every", "0", "--log-every", "1", "--output", str(folder)),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not read_log(folder / "log.jsonl"):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130, err
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert f"stopped after step {step} of 1000000, and saved" in err
    assert f"go on with: nucleon train --resume --output {folder}" in err
    assert "Traceback" not in err
    done = command("--resume", "--output", folder, "--steps", step + 2)
    assert done.exit_code == 0, done.output
    assert f"from step {step}," in done.stdout
