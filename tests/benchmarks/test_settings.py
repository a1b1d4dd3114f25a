"""The rates of the small tasks: every task trains, and a search ends inside its grid."""

import functools
import math
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("sklearn")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import settings
from settings import TASKS, Way


@pytest.mark.parametrize("task", TASKS)
def test_every_task_learns_by_every_optimizer(task, monkeypatch):
    """Twelve steps lower the held-out loss of no steps at all, from the same start."""
    make, _, first = TASKS[task]
    monkeypatch.setitem(TASKS, task, (make, 12, first))
    start = functools.cache(functools.partial(settings.pretrained.__wrapped__, 30))
    monkeypatch.setattr(settings, "pretrained", start)
    before = make(0)[2]().item()
    ways = ((Way("AdamW"), 2e-3), (Way("Muon", "spectral", 2e-3), 0.02))
    for way, rate in (*ways, (Way("Leon", "match-adamw", average=0.1), 4e-3)):
        assert settings.run(task, way, rate, 0) < before


def test_a_search_ends_inside_its_grid(capsys, monkeypatch):
    """A valley at 0.09 for every optimizer: the best rate has a worse one on either side."""
    monkeypatch.setattr(settings, "run", lambda _, way, rate, seed: math.log(rate / 0.09) ** 2)
    settings.main(["--task", "gpt", "--seeds", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\d: ", line)]
    rows = [[float(x) for x in re.findall(r": ([\d.]+)", line.split("|")[4])] for line in lines]
    assert len(rows) == 7
    searched = [row for row in rows if len(row) > 2]
    assert len(searched) == 4 and all(row[0] > min(row) < row[-1] for row in searched)
