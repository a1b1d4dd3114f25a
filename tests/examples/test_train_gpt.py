"""`examples/train_gpt.py` learns, goes on where it was stopped, and says what is true."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SMALL = {"width": 32, "heads": 2, "layers": 1, "context": 32, "batch": 8, "device": "cpu"}
WORDS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def train(monkeypatch, capsys):
    """Run the script with arguments and return what it printed."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *WORDS, *map(str, words)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_it_learns_and_certifies_every_matrix(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = train("--steps", 60, "--log-every", 20)
    losses = [float(loss) for loss in re.findall(r"held-out loss (\S+)", out)]
    floor = float(re.search(r"below (\S+) nats", out)[1])
    assert len(losses) == 3
    assert floor < losses[-1] < 0.9 * losses[0]
    assert len(re.findall(r"blocks\.0\.\w+\.weight +│ [\d.]+ +│ [\d.]+ +│ yes", out)) == 6
    assert not list(tmp_path.iterdir())  # without --folder nothing is written


def test_a_run_that_was_stopped_ends_as_one_that_was_not(train, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the average is the model, " * 200, encoding="utf-8")
    for folder, lengths in (("whole", [8]), ("broken", [3, 8])):
        for steps in lengths:
            train("--text", text, "--steps", steps, "--folder", tmp_path / folder)
    whole, broken = (
        torch.load(tmp_path / folder / "checkpoint.pt", weights_only=True)
        for folder in ("whole", "broken")
    )
    assert whole["step"] == broken["step"] == 8
    assert whole["model"].keys() == broken["model"].keys()
    averages = [torch.load(tmp_path / folder / "model.pt") for folder in ("whole", "broken")]
    for name, weight in whole["model"].items():
        assert torch.equal(weight, broken["model"][name]), name
        assert torch.equal(*(average[name] for average in averages)), name
        assert not torch.equal(weight, averages[0][name]), name  # the run itself is kept apart
    for key, state in whole["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, broken["optimizer"]["state"][key][name]), (key, name)
    with pytest.raises(SystemExit, match="another --folder"):
        train("--steps", 9, "--folder", tmp_path / "whole")  # another text
