import dataclasses
import json
import os
import random
import shutil
import signal

import pytest
import torch
from killing import final, survive

from helpers_states import differences
from nucleon.training import Options, Recipe, RunError, begin, resume
from nucleon.training.run import read_log

RECIPE = Recipe(8, log_every=1, evaluate_every=3, save_every=2)
TEXT = Options(
    "text",
    RECIPE,
    optimizer="pion",
    batch=4,
    megabytes=0.02,
    context=16,
    layers=1,
    heads=2,
    width=16,
    dropout=0.1,
)


def stopping(after):
    """A wish to stop before the step after so many."""
    asked = iter(range(10**6))
    return lambda: next(asked) >= after


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    summary = begin(TEXT, folder).go()
    assert summary.finished
    return folder, summary


def test_a_folder_holds_options_log_and_checkpoints(whole):
    folder, summary = whole
    names = [".lock", "checkpoints", "run.json", "trace.jsonl"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert json.loads((folder / "run.json").read_text())["options"]["optimizer"] == "pion"
    log = read_log(folder / "trace.jsonl")
    assert [r["step"] for r in log if "loss" in r] == list(range(1, 9))
    assert summary.figures["loss"] == log[-2]["loss"]
    assert summary.figures["test_loss"] == log[-1]["test_loss"]
    assert summary.steps == 8


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(whole, tmp_path, after):
    folder = tmp_path / "run"
    stopped = begin(TEXT, folder).go(stop=stopping(after))
    assert (stopped.steps, stopped.finished) == (after, False)
    run = resume(folder)
    assert run.start == after
    assert run.go().finished
    assert differences(final(folder), final(whole[0])) == []
    assert (folder / "trace.jsonl").read_bytes() == (whole[0] / "trace.jsonl").read_bytes()


def test_a_log_that_ran_ahead_of_the_checkpoint_is_cut_back(whole, tmp_path):
    """As a kill leaves it: records after the last checkpoint, and half a line."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    with (folder / "trace.jsonl").open("a") as log:
        log.write('{"step": 9, "lo')
    run = resume(folder)
    assert run.start == 6
    run.go(stop=lambda: True)
    assert max(r["step"] for r in read_log(folder / "trace.jsonl")) == 6
    resume(folder).go()
    assert (folder / "trace.jsonl").read_bytes() == (whole[0] / "trace.jsonl").read_bytes()
    assert differences(final(folder), final(whole[0])) == []


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path):
    folder, said = tmp_path / "run", []
    shutil.copytree(whole[0], folder)
    os.truncate(folder / "checkpoints" / "step-00000008" / "state.pt", 100)
    run = resume(folder, say=said.append)
    assert run.start == 6
    assert "step 8 is damaged" in said[0]
    run.go()
    assert differences(final(folder), final(whole[0])) == []


def test_without_any_good_checkpoint_a_run_begins_again(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints")
    run = resume(folder)
    assert run.start == 0
    run.go()
    assert differences(final(folder), final(whole[0])) == []


def test_a_finished_run_has_nothing_left_to_do(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    assert resume(folder).go().figures == whole[1].figures
    more = resume(folder, {"steps": 10}).go()
    assert more.steps == 10
    longer = dataclasses.replace(TEXT, recipe=dataclasses.replace(RECIPE, steps=10))
    begin(longer, tmp_path / "longer").go()
    # Evaluated at the end: the shorter run did so after step 8 as well.
    a, b = final(folder), final(tmp_path / "longer")
    assert differences(a["state"], b["state"]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "begun with seed = 0, not 1"),
        ({"optimizer": "leon"}, "begun with optimizer = pion, not leon"),
        ({"clip": 1.0}, "begun with clip = 0.0"),
    ],
)
def test_other_options_than_those_of_the_run_are_refused(whole, changes, words):
    with pytest.raises(RunError, match=words):
        resume(whole[0], changes)
    assert resume(whole[0], {"seed": 0, "optimizer": "pion"}).start == 8


def test_more_steps_do_not_fit_a_schedule_made_for_fewer(tmp_path):
    cosine = dataclasses.replace(TEXT, recipe=dataclasses.replace(RECIPE, schedule="cosine"))
    begin(cosine, tmp_path / "run").go(stop=stopping(2))
    with pytest.raises(RunError, match="cosine schedule was made for 8 steps"):
        resume(tmp_path / "run", {"steps": 9})


def test_changed_data_are_refused(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("to be or not to be, that is the question. " * 20)
    options = dataclasses.replace(TEXT, data=str(source))
    begin(options, tmp_path / "run").go(stop=stopping(2))
    source.write_text("to be or not to be, that is the answer... " * 20)
    with pytest.raises(RunError, match="not those it was begun with"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no run in"),
        ("{", "cannot be read"),
        ('{"options": {"task": "text"}, "data": ""}', "cannot be read"),
        ('{"options": {"task": "chess", "recipe": {"steps": 1}}, "data": ""}', "cannot be read"),
        ("[" * 200_000, "cannot be read"),
        *(
            (json.dumps({"options": {"task": "digits", "recipe": {"steps": 1}, **wrong}}), words)
            for wrong, words in (
                ({"optimizer": 5}, "cannot be read: optimizer must be a name, got 5"),
                ({"set": "ab"}, "set must be an object"),
                ({"seed": {}}, "seed must be an integer"),
                ({"data": 5}, "data must be a path or null"),
            )
        ),
    ],
)
def test_a_folder_without_a_readable_run_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=words):
        resume(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="needs pipes and devices")
@pytest.mark.parametrize("kind", ["pipe", "link to a device", "folder"])
def test_options_that_are_no_plain_file_are_refused_at_once(tmp_path, kind):
    path = tmp_path / "run.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    signal.alarm(60)  # a reader that waits must not make the tests wait
    try:
        with pytest.raises(RunError, match=r"run\.json is not a plain file"):
            resume(tmp_path)
    finally:
        signal.alarm(0)


def test_a_run_is_not_written_over(whole):
    before = final(whole[0])
    with pytest.raises(RunError, match="holds a run already"):
        begin(TEXT, whole[0])
    assert differences(final(whole[0]), before) == []


def test_losses_that_are_not_finite_are_words_in_the_log(tmp_path):
    bad = dataclasses.replace(TEXT, optimizer="sgd", lr=1e30)
    begin(bad, tmp_path / "run").go()
    lines = (tmp_path / "run" / "trace.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (
        not torch.tensor([r.get("loss", 0.0) for r in read_log(tmp_path / "run/trace.jsonl")])
        .isfinite()
        .all()
    )


def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path):
    """Three real kills; `python tests/training/killing.py` does as many as one likes."""
    assert survive(tmp_path, 3, "leon", random.Random(0)) == []
