"""The runner of the evidence: runs, choices, the queue, the report."""

import json
import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import linprog

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import evidence
import evidence_report
from evidence import DECAYS, FALLS, Log, Run, append, finish, outstanding, perform
from evidence_cells import (
    CELLS,
    SMOKE,
    Cell,
    Matrix,
    Problem,
    Regression,
    Words,
    repeated,
    write_pairs,
)
from gpt import read

NOWHERE = Path("/nowhere")


def test_the_average_of_a_short_run_is_below_its_last_iterate():
    """A GPT on the sources of Python: one seed, T = 150, a constant rate."""
    record = perform(Run("smoke", "muon", "constant", 0.02, 0, 150, (150,)), SMOKE, NOWHERE)
    for horizon in SMOKE.horizons:
        losses = record["readings"][horizon]
        assert losses["0.1"] < losses["last"] < 3.5  # ln 97 = 4.6 at the start
    assert abs(record["forks"][150]["last"] - record["readings"][150]["0.1"]) < 0.1


def test_every_average_has_its_mean_age_whoever_keeps_it():
    """Muon keeps f = .1 itself, AdamW has all three beside it: on a ramp an average is its age."""

    class Ramp:
        def problem(self, *_):
            def walk(model, step):
                with torch.no_grad():
                    model.weight.fill_(step)
                return model.weight.sum()

            matrix = Matrix(torch.zeros(2, 2))
            return Problem(matrix, walk, lambda model: {"": model.weight.mean().item()})

    cell = Cell(Ramp(), {}, 40, (40,), ())
    for method in ("muon", "adamw"):
        read = perform(Run("", method, "constant", 1e-9, 0, 40), cell, NOWHERE)["readings"][40]
        ages = {f: 39 - read[f] for f in ("last", "0.05", "0.1", "0.2")}
        assert ages == pytest.approx({"last": 0, "0.05": 1.95, "0.1": 3.9, "0.2": 7.8}, abs=1e-4)


def test_a_fork_leaves_the_run_as_it_was_and_ends_where_a_decayed_run_does():
    cell = replace(CELLS["C-l1"], steps=200, horizons=(100, 200), between=())
    run = Run("C-l1", "muon", "constant", 0.02, 0, 200)
    plain, forked = (perform(replace(run, forks=f), cell, NOWHERE) for f in ((), (100, 200)))
    assert forked["readings"] == plain["readings"]
    decayed = perform(replace(run, schedule="linear", steps=100), cell, NOWHERE)
    kept = forked["forks"][100]["last"], decayed["readings"][100]["last"]
    assert max(kept) < plain["readings"][100]["last"]  # both have come to rest at the kink


def test_schedules_begin_at_one_and_decays_end_at_zero():
    assert {schedule(0.0) for schedule in (*FALLS.values(), *DECAYS.values())} == {1.0}
    assert [decay(1.0) for decay in DECAYS.values()] == [0.0, 0.0]
    assert FALLS["sqrt"](50 / 1200) == pytest.approx(2**-0.5)  # t0 = 50 at T = 1,200
    assert FALLS["inverse"](300 / 1200) == pytest.approx(0.5)  # t0 = T/4


@pytest.mark.parametrize("task", [Regression(0.5), Regression(0.1)], ids=str)
def test_the_minimum_of_a_regression_is_that_of_a_linear_program(task):
    """Minimize Σ(τu + (1−τ)v), u − v = y − xw, u, v ≥ 0, column by column, by SciPy."""
    x, y, best = (tensor.numpy() for tensor in task.data(3))
    problem, (n, tau) = task.problem(3, 1, NOWHERE, "cpu"), (len(x), task.quantile)
    cost = np.concatenate([np.zeros(16), np.full(n, tau), np.full(n, 1 - tau)])
    equal = np.hstack([x, np.eye(n), -np.eye(n)])
    bounds = [(None, None)] * 16 + [(0, None)] * (2 * n)
    solved = [linprog(cost, A_eq=equal, b_eq=column, bounds=bounds) for column in y.T[:3]]
    at_best = y - x @ best
    values = np.maximum(tau * at_best, (tau - 1) * at_best).sum(0)
    assert [one.fun for one in solved] == pytest.approx(values[:3], rel=1e-8)
    assert problem.judge(Matrix(torch.from_numpy(best)))[""] == pytest.approx(0, abs=1e-12)
    zero = np.maximum(tau * y, (tau - 1) * y).mean() - values.sum() / y.size
    assert problem.judge(problem.model)[""] == pytest.approx(zero, rel=1e-12)


def test_written_byte_pairs_are_read_as_they_were(tmp_path):
    task = Words("tokens/some", pairs=300, layers=1, width=16, heads=2, context=8, batch=2)
    content = read(limit=60_000)
    write_pairs(task, content[:50_000], content[50_000:], tmp_path)
    text = task.text(tmp_path, "cpu")
    assert repeated(text.tokens, text.tokens[500:700]) == 1
    assert repeated(text.tokens[:500], text.tokens[484:700]) == pytest.approx(0, abs=0.01)
    assert 10_000 < len(text.tokens) < 50_000 and 255 < int(text.tokens.max()) < 300
    problem = task.problem(0, 3, tmp_path, "cpu")
    with torch.no_grad():  # a fresh model knows nothing
        assert problem.judge(problem.model)[""] == pytest.approx(math.log(300), abs=0.1)
        assert problem.loss(problem.model, 2).item() == pytest.approx(math.log(300), abs=0.2)


def bowl(need):
    """A loss whose best rate is .01, lower by the average, higher at earlier horizons."""
    draw = random.Random(f"{need.cell} {need.seed} {need.horizon}")  # of a seed, for all arms
    rate = 0.05 * math.log2(need.rate / 0.01) ** 2
    return 2 - need.horizon / 5000 + rate + draw.uniform(-0.05, 0.05)


def simulated(run):
    """The line of a run that is not performed."""
    cell, falls = CELLS[run.cell], run.schedule in FALLS
    need = evidence.Need(run.cell, run.method, run.schedule, run.rate, run.seed, 0)
    read = [h for h in (*cell.horizons, *cell.between) if falls and h <= run.steps] or [run.steps]
    gain = {"last": 0.04, "0.05": 0.01, "0.1": 0.0, "0.2": 0.02} if falls else {"last": 0.0}
    gain |= {f"{name} train": v - 1 for name, v in gain.items()}
    slower = 0.03 * (run.schedule == "inverse")
    return {
        "run": evidence.asdict(run),
        "readings": {
            h: {k: bowl(need._replace(horizon=h)) + v + slower for k, v in gain.items()}
            for h in read
        },
        "forks": {h: {"last": bowl(need._replace(horizon=h)) + 0.03} for h in run.forks},
        "seconds": 1.0,
    }


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A log of A1, A2 and A3 that is whole, and its folder."""
    folder = tmp_path_factory.mktemp("lines")
    log, cells, counts = Log(folder), ["A1", "A2", "A3", "G-novels-4k"], []
    while left := outstanding(cells, log):
        counts.append(len(left))
        for run in left:
            record = json.loads(json.dumps(simulated(run)))
            log.add(record)
            append(folder / f"{run.cell}.jsonl", record)
    assert len(counts) == 4  # what tunes, grids that grow twice, what is compared
    return folder, log


def test_a_log_tells_what_is_left(done):
    folder, log = done
    again = Log(folder)
    assert not outstanding(["A1", "A2", "A3"], again)
    assert again.losses.keys() == log.losses.keys()
    with (folder / "A1.jsonl").open("a") as file:
        file.write('{"run": {"cell": "A1", "met')  # a machine that was lost
    assert not outstanding(["A1"], Log(folder))


def test_a_rate_at_the_end_of_its_grid_extends_it(done):
    _, log = done
    grid, horizons = CELLS["A2"].grids["adamw"], CELLS["A2"].horizons
    adamw = evidence.tune("A2", "adamw", "sqrt", horizons, log)
    assert (adamw.rate, adamw.inside) == (grid[-1], True)  # .016 was tried, and is worse
    muon = evidence.tune("A1", "muon", "sqrt", CELLS["A1"].horizons, log)
    assert (muon.rate, muon.reading, muon.inside) == (0.01, "0.1", True)
    assert evidence.tune("A3", "muon", "sqrt", CELLS["A3"].horizons, log) == muon  # A1's


def test_one_constant_run_serves_its_average_and_its_forks():
    left = outstanding(["A1"], Log())
    constant = [run for run in left if run.schedule == "constant"]
    assert len(constant) == 8 and {run.forks for run in constant} == {(150, 300, 600, 1200)}
    assert {run.seed for run in left} == {100, 101}


def test_the_report_of_a_log_has_its_differences_and_a_picture(done, tmp_path):
    _, log = done
    page = tmp_path / "evidence.md"
    begin, end = evidence_report.BEGIN, evidence_report.END
    page.write_text(f"Words.\n\n{begin}\nold\n{end}\nMore.\n")
    evidence_report.report(log, page, tmp_path / "anytime.png")
    text = page.read_text()
    assert text.startswith("Words.") and text.endswith("More.\n") and "old" not in text
    # Noise is the same for all arms, so the average is below wsd by .03 and level with linear.
    assert "| **the average less linear** | 0.000 ± 0.000, equal |" in text
    assert "| **the average less wsd** | -0.030 ± 0.000, lower |" in text
    assert text.count("its average less that of Muon") == 3
    assert "| linear, on the text trained on |" in text
    assert (tmp_path / "anytime.png").stat().st_size > 10_000
    evidence_report.report(log, page, tmp_path / "anytime.png")
    assert page.read_text() == text


def test_intervals_are_those_of_student():
    for n in range(2, 11):
        values = torch.randn(n).tolist()
        mean, half = evidence_report.interval(values)
        expected = stats.t.interval(0.95, n - 1, stats.tmean(values), stats.sem(values))
        assert (mean - half, mean + half) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("mean", "half", "word"),
    [(0.019, 0.02, "equal"), (-0.03, 0.02, "lower"), (0.03, 0.02, "higher"), (0.0, 0.03, "open")],
)
def test_the_word_for_a_difference(mean, half, word):
    assert evidence_report.verdict(mean, half, 0.02) == word


def test_processes_perform_what_a_log_lacks_and_name_a_run_that_raises(tmp_path, capsys):
    """Three runs of real processes; the fourth has no data."""
    log, cells = Log(), ["C-l1", "A1"]
    while left := outstanding(cells, log):
        for run in left:
            log.add(json.loads(json.dumps(simulated(run))))
    names = [(n, (n.cell, n.arm, n.seed, n.horizon)) for n in log.losses]
    lost = {("C-l1", "linear", 9, h) for h in (125, 250, 500)} | {("A1", "cosine", 9, 1200)}
    for need in [need for need, name in names if name in lost]:
        del log.losses[need]
    assert len(outstanding(cells, log)) == 4
    assert finish(cells, log, tmp_path, NOWHERE, 2, time.monotonic() + 300) == 1
    lines = (tmp_path / "C-l1.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["run"]["steps"] for line in lines) == [125, 250, 500]
    assert [run.cell for run in outstanding(cells, log)] == ["A1"]
    assert "FileNotFoundError" in capsys.readouterr().err
    assert finish(cells, log, tmp_path, NOWHERE, 1, time.monotonic()) == 0  # no time is left
