"""`nucleon bench evidence` over all stages: their order, its plan, the start of fine-tuning, and
stages B and C from end to end at a small size."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from statistics import fmean

import pytest
import torch
from scipy import stats
from test_evidence import CPU, SCRIPT, SMALL, bowl, corpora, learnable, queue, simulated

import evidence_stages as stages
import evidence_start
from evidence_plan import COMPILING, PLAIN, expected, plan
from evidence_queue import Log, read, trial_of
from evidence_report import Results, figure, occupied, report, text
from evidence_stages import ADAMW, LEON, LEON3, MUON, PARTS, Cell, Part, parts
from evidence_start import trained
from evidence_training import Texts

MINUTE = timedelta(minutes=1)


def line(trial, loss, number=0, **more):
    """A line of a log; each run takes a minute and begins when the one before it has ended."""
    when = datetime(2026, 1, 1, tzinfo=UTC) + (number + 1) * MINUTE
    return {
        **asdict(trial), "status": "ok", "final_loss": loss, "losses": [[trial.steps, loss]],
        "seconds": 60.0, "jobs": 1, "device": "cpu", "torch": "2", "when": when.isoformat(), **more,
    }  # fmt: skip


OF_SEEDS = (0.0, 0.3, -0.2, 0.1, -0.4)


def with_stage_a(folder, small=True, of_seeds=(0.0,) * 5):
    """A log in which all of stage A is done, with losses of a function."""
    stage, log = stages.tiny(stages.A) if small else stages.A, Log(folder)
    _, order = simulated(stage, bowl)
    for number, trial in enumerate(order):
        log.append(line(trial, bowl(trial) + of_seeds[trial.seed], number))
    return log


def done_in_order(todo):
    """All runs as the queue does them, with losses that a function gives."""
    done, order = {}, []
    while True:
        left = [(p, t) for p, t in stages.in_order(todo, done.get) if t not in done]
        assert len({t for _, t in left}) == len(left)  # nothing is counted twice
        if not left:
            return done, order
        done[left[0][1]] = bowl(left[0][1])
        order.append(left[0])


# ------------------------------------------------------------------ the order, and its plan


def test_the_parts_take_every_run_once_and_the_answer_comes_first():
    done, order = done_in_order(PARTS)
    for stage in stages.STAGES.values():
        own = {trial for part, trial in order if part.stage is stage}
        assert own == {*stages.wanted(stage, done.get)}
    assert len(order) == len(done)
    # AdamW goes on while nothing else can; from then on the parts follow one another.
    names = [part.name for part, _ in order if part.name.startswith(("B", "C"))]
    begun = [*dict.fromkeys(names)]
    assert begun == [part.name for part in PARTS if part.name.startswith(("B", "C"))]
    assert names == sorted(names, key=begun.index)
    first = [trial for part, trial in order if part.stage.name == "B"][:6]
    assert Counter((t.method, t.rate) for t in first) == {(MUON, 1e-3): 3, (LEON, 1e-3): 3}
    assert [t.seed for t in first] == [0, 0, 1, 1, 2, 2]


def test_fine_tuning_is_wanted_once_there_is_a_model_to_tune():
    adamw = [t for t in simulated(stages.A, bowl)[1] if (t.method, t.cell) == (ADAMW, "4k")]
    losses = {trial: bowl(trial) for trial in adamw if trial.rate != 4e-3}
    assert [*stages.wanted(stages.C, losses.get)] == []
    losses |= {trial: bowl(trial) for trial in adamw}
    assert [*stages.wanted(stages.C, losses.get)] != []


def test_a_run_is_expected_to_take_what_those_like_it_took():
    at_4k = stages.trial(stages.A, stages.A.cell("4k"), MUON, 1e-3, 2e-3, 0, "")
    records = [line(at_4k, 4.0, seconds=seconds) for seconds in (40.0, 48.0, 90.0)]
    per_step = 48.0 / 2441
    assert expected(stages.A, at_4k, records, 1) == pytest.approx(48.0)
    for name, steps, factor in (("16k", 610, 4.0), ("1k", 9765, 1.0)):
        made = stages.trial(stages.A, stages.A.cell(name), MUON, 1e-3, 2e-3, 0, "")
        assert expected(stages.A, made, records, 1) == pytest.approx(steps * per_step * factor)
    larger = replace(at_4k, stage="B")
    grown = 16 * 768**2 / (8 * 512**2)
    assert expected(stages.B, larger, records, 1) == pytest.approx(48.0 * grown)
    own = line(larger, 4.0, seconds=100.0)
    assert expected(stages.B, larger, [*records, own], 1) == pytest.approx(100.0)
    tuned = stages.trial(stages.C, stages.C.cell("full, 8"), MUON, 1e-3, None, 0, "")
    assert expected(stages.C, tuned, records, 1) == pytest.approx(PLAIN * 195 * per_step)
    assert expected(stages.C, tuned, [], 1) is None
    # As one of four it takes four times as long, until others of four say what they took.
    assert expected(stages.A, at_4k, records, 4) == pytest.approx(4 * 48.0)
    four = {**line(at_4k, 4.0, seconds=150.0), "jobs": 4}
    assert expected(stages.A, at_4k, [*records, four], 4) == pytest.approx(150.0)


def test_the_plan_counts_the_runs_that_are_left_and_their_minutes(tmp_path):
    log = with_stage_a(tmp_path, small=False)
    *rows, total = plan(PARTS, log.loss, log.records)
    assert [row.split("  ")[-1] for row in rows] == [
        part.name for part in PARTS if part.stage.name in "BCD"
    ]
    counts = [int(row.split()[0]) for row in rows]
    assert (counts[0], counts[-2], counts[-1]) == (6, 12, 12 * (3 + 4))
    minutes = 6 * 16 * 768**2 / (8 * 512**2) + COMPILING / 60  # a run of A took a minute
    assert float(rows[0].split()[2]) == pytest.approx(minutes, abs=0.05)
    _, order = simulated(stages.C, lambda t: bowl(t, best=2.5e-4, aux=2.5e-4), log.finals)
    assert int(total.split()[0]) == 18 + len(order) + 84 and "1 runs side by side on cpu" in total
    assert plan(parts("A"), log.loss, log.records)[0].split()[:2] == ["0", "runs"]
    assert "not known" in plan(PARTS, lambda _: None, [])[0]


# ------------------------------------------------------------------ the start of fine-tuning


def test_a_start_is_kept_and_trained_to_the_same_bits_where_it_is_gone(tmp_path, monkeypatch):
    found, kept = Texts(learnable(), 16, CPU), tmp_path / "start.pt"
    trial = stages.trial(SMALL, SMALL.cells[0], ADAMW, 4e-3, None, 0, "base")
    first = trained(SMALL, trial, found, kept)
    assert not torch.are_deterministic_algorithms_enabled()
    kept.unlink()
    assert trained(SMALL, trial, found, kept).fingerprint == first.fingerprint
    other = trained(SMALL, replace(trial, seed=1), found, kept)  # a file of another run
    assert other.fingerprint != first.fingerprint
    monkeypatch.setattr(evidence_start, "Training", None)  # it is read, not trained
    again = trained(SMALL, replace(trial, seed=1), found, kept)
    assert (again.fingerprint, again.loss) == (other.fingerprint, other.loss)


def test_a_start_that_fails_is_no_failure_of_the_runs_that_would_begin_with_it(
    tmp_path, monkeypatch
):
    log, said = with_stage_a(tmp_path), []

    def fails(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr("evidence_queue.trained", fails)
    todo = queue(log, corpora(tmp_path / "data"), parts("C", small=True), say=said.append)
    assert todo.work() and not log.path("C").exists()
    assert said == ["no fine-tuning, as its start failed: RuntimeError: no room"]


def test_runs_that_began_with_another_model_are_still_to_be_done(tmp_path):
    log = with_stage_a(tmp_path)
    stage = stages.tiny(stages.C)
    cell = stage.cells[0]
    for seed, (ours, theirs) in enumerate([("a", "a"), ("a", "a"), ("a", "b")]):
        for method, start in ((LEON, ours), (MUON, theirs)):
            made = stages.trial(stage, cell, method, 1e-3, None, seed, "seeds")
            log.append(line(made, 4.0 + seed, start=start, smoothing_share_half=0.5 + seed))
    failed = stages.trial(stage, cell, LEON, 1e-3, None, 3, "seeds")
    for _ in range(2):
        log.append({**line(failed, 0.0, start="a"), "status": "failed"})
    log.append(line(replace(failed, method=MUON), 4.0, start="a"))
    again = Log(tmp_path)
    assert (
        again.start == "a" and again.loss(made) is None and len(again.records) == len(log.records)
    )
    less = Results(stage, cell, again).difference(LEON, 1e-3, MUON, 1e-3)
    assert less.count == 3 and less.mean == math.inf  # the run that failed for good counts
    found = Results(stage, cell, again)
    found.best = {LEON: 1e-3, MUON: 1e-3}
    shares = [found.mean_of("smoothing_share_half", method) for method in (LEON, MUON)]
    assert shares == ["1.500", "1.000"]  # Muon's third began with another model
    again.begin_with("b")
    assert again.loss(made) == 6.0 and again.loss(replace(made, seed=0)) is None
    assert Results(stage, cell, again).difference(LEON, 1e-3, MUON, 1e-3).count == 0


# ------------------------------------------------------------------ the queue


def test_a_corpus_that_is_missing_is_named_before_anything_runs(tmp_path):
    data = corpora(tmp_path / "data")
    (data / "programs.pt").unlink()
    with pytest.raises(SystemExit, match=r"has no programs\.pt"):
        queue(Log(tmp_path), data, parts(small=True))
    queue(Log(tmp_path), data, parts("A", small=True))


def test_a_shorter_run_takes_the_time_that_a_longer_one_would_not_end_in(tmp_path):
    log, data = with_stage_a(tmp_path), corpora(tmp_path / "data")
    long = replace(stages.tiny(stages.B), tokens=10**9)
    short = replace(stages.tiny(stages.C), tokens=16, methods=(ADAMW,), seeds=1)
    todo = [Part("long", long), Part("short", replace(short, cells=(Cell("full, 4", 1),)))]
    assert queue(log, data, todo, jobs=1, seconds=500.0).work()
    assert not log.path("B").exists() and len(read(log.path("C"))) >= 5


@pytest.mark.slow
def test_fine_tuning_goes_on_after_a_kill_with_the_model_that_was_kept(tmp_path):
    """As typed; the line that is being read when the process is killed is whole in the log."""
    log, data = with_stage_a(tmp_path / "logs"), corpora(tmp_path / "data")
    words = ["--tiny", "--device", "cpu", "--data", data, "--logs", log.folder, "--jobs", "2"]
    command = [sys.executable, SCRIPT, *words, "--stage", "C"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        for _ in range(1 + 3):  # the start, and some runs
            process.stdout.readline()
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2 and "is being written by process" in second.stderr
        time.sleep(0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = log.path("C").read_text()
    assert before.endswith("\n") and len(before.splitlines()) >= 3
    kept = (data / "start.pt").stat().st_mtime_ns
    again = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        for _ in range(1 + 1):  # the start, and a run
            again.stdout.readline()
    finally:
        again.send_signal(signal.SIGKILL)
        again.communicate()
    after = log.path("C").read_text()
    assert after.startswith(before) and len(after) > len(before)
    records = read(log.path("C"))
    assert len({trial_of(r) for r in records}) == len(records)
    assert len({r["start"] for r in records}) == 1
    assert (data / "start.pt").stat().st_mtime_ns == kept
    report(log.folder, {"C": stages.tiny(stages.C)})
    assert (log.folder / "stage-c.svg").exists()


def test_stage_b_does_its_best_rates_before_the_others(tmp_path):
    log, data = with_stage_a(tmp_path), corpora(tmp_path / "data")
    todo = [replace(p, stage=replace(p.stage, tokens=16 * 4)) for p in parts("B", small=True)]
    assert queue(log, data, todo).work()
    records, stage = read(log.path("B")), todo[0].stage
    assert {trial_of(r) for r in records} == {*stages.wanted(stage, log.loss)}
    assert len(records) == 18 and {r["status"] for r in records} <= {"ok", "diverged"}
    assert {r["phase"] for r in records[:6]} == {"seeds"}
    found = Results(stage, stage.cells[0], log)
    assert found.difference(LEON, 1e-3, MUON, 1e-3).count == 3


# ------------------------------------------------------------------ the report


def test_a_report_can_be_drawn_from_every_beginning_of_the_logs():
    begin = ("A, 4 k", "B", "C: full, 4", "D")
    todo = [p for p in parts(small=True) if p.name.startswith(begin)]
    _, order = done_in_order(todo)
    for count in range(0, len(order), 11):
        log = Log(SCRIPT.parent / "nowhere")
        begun = enumerate(order[:count])
        log.records = [line(trial, bowl(trial), n) for n, (_, trial) in begun]
        log.begin_with(None)
        for name in stages.STAGES:
            stage = stages.tiny(stages.STAGES[name])
            cells = [Results(stage, cell, log) for cell in stage.cells]
            drawn = [found for found in cells if found.methods]
            page = text(stage, drawn, log)
            own = sum(t.stage == name for _, t in order[:count])
            assert f"{own} lines: {own} runs ended well" in page
            if stage.varies:
                continue  # its tables are all there is
            points = [x for panel in figure(stage, drawn).panels for s in panel.series for x in s.x]
            assert bool(points) == bool(drawn)


def test_a_variant_is_compared_with_its_method_seed_by_seed(tmp_path):
    """By hand: of five differences d, the interval is mean ± 2.7764 s/√5."""
    log, stage = with_stage_a(tmp_path, of_seeds=OF_SEEDS), stages.tiny(stages.D)

    def loss(trial):
        away = math.log2(trial.rate / (8e-3 if "spectral" in trial.method else 1e-3))
        off = (0.01, 0.02, 0.03, 0.04, 0.1)[trial.seed] if trial.method == "Muon, spectral" else 0.0
        return 4 + 0.1 * away**2 + off + 0.01 * (trial.aux_lr == 3e-4) + OF_SEEDS[trial.seed]

    for number, trial in enumerate(simulated(stage, loss, log.finals)[1]):
        log.append(line(trial, loss(trial), number))
    report(tmp_path, {"D": stage})
    page = (tmp_path / "stage-d.md").read_text()
    assert "| Muon, spectral | Muon at 0.001 | 0.0400 ± 0.0439 | -0.0600 ± 0.0439 | 5 |" in page
    assert "| Leon, spectral | Leon c=1 at 0.001 | 0.0000 ± 0.0000 | -0.1000 ± 0.0000 | 5 |" in page
    assert "| Muon, aux_lr 1e-3 | Muon, aux_lr 3e-4 at 0.001 | -0.0100 ± 0.0000 | — | 5 |" in page
    assert "| Leon, aux_lr 1e-3 | Muon, aux_lr 1e-3 at 0.001 | 0.0000 ± 0.0000 | — | 5 |" in page
    assert page.count(" at 0.001 |") == len(stages.VARIANTS) + 5


def test_a_best_rate_is_inside_where_both_of_its_neighbours_are_worse(tmp_path):
    stage, log = replace(SMALL, methods=(MUON,)), Log(tmp_path)
    done, order = simulated(stage, lambda t: -t.rate)  # ever better: the grid ends
    for number, trial in enumerate(order):
        log.append(line(trial, done[trial], number))
    found = Results(stage, stage.cells[0], log)
    assert found.interior(MUON) == "0.064, at the end of the grid"  # twice it was run, and lower
    beyond = found.at(MUON, 0.128, 0)
    log.append(line(beyond, 0.0))
    assert Results(stage, stage.cells[0], log).interior(MUON) == "0.064"


def test_minutes_are_those_in_which_a_run_was_under_way():
    assert occupied([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)]) == 6.0
    assert occupied([]) == 0.0


PUBLISHED = SCRIPT.parents[1] / "docs/evidence"
FULL = {"1k": 9765, "4k": 2441, "16k": 610}
AUX = None, 8e-3
"""The `aux_lr` of the runs of A that are compared: of AdamW, and of the matrix methods."""


def published(name):
    """The lines of a published log that are compared, without the report's code."""
    lines = [json.loads(each) for each in (PUBLISHED / f"{name}.jsonl").read_text().splitlines()]
    starts = Counter(r.get("start") for r in lines).most_common(1)
    return [r for r in lines if r.get("start") == starts[0][0]]


def losses(lines, cell, method, rate, steps=None):
    """Final losses by seed; those of whole runs unless steps are given."""
    kept = [r for r in lines if (r["cell"], r["method"], r["rate"]) == (cell, method, rate)]
    steps = steps or max(r["steps"] for r in kept)
    return {r["seed"]: r["final_loss"] for r in kept if r["steps"] == steps}


def best(lines, cell, method):
    """The rate at which seed 0 has the lowest loss."""
    kept = [r for r in lines if (r["cell"], r["method"], r["seed"]) == (cell, method, 0)]
    steps = max(r["steps"] for r in kept)
    return min((r["final_loss"], r["rate"]) for r in kept if r["steps"] == steps)[1]


def paired(ours, theirs):
    """The difference as SciPy has it, written as in the tables."""
    assert ours.keys() == theirs.keys() and len(ours) in (3, 5)
    order = sorted(ours)
    found = stats.ttest_rel([ours[s] for s in order], [theirs[s] for s in order])
    low, high = found.confidence_interval(0.95)
    return f"{(low + high) / 2:.4f} ± {(high - low) / 2:.4f}"


def rows(name, cell, heading):
    """Of the table with a heading, in the section of a cell: what follows each first column."""
    section = (PUBLISHED / f"{name}.md").read_text().split(f"## {cell}\n")[1].split("\n## ")[0]
    (table,) = (block for block in section.split("\n\n") if block.startswith(f"| {heading}"))
    cells = [[c.strip() for c in row.strip("|").split("|")] for row in table.strip().split("\n")]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize("name", stages.STAGES)
def test_the_published_pages_are_what_the_logs_give(name):
    stage, log = stages.STAGES[name], Log(PUBLISHED)
    cells = [Results(stage, cell, log) for cell in stage.cells]
    assert (PUBLISHED / f"stage-{name.lower()}.md").read_text() == text(stage, cells, log)


def test_the_tables_of_stage_a_are_what_scipy_makes_of_its_log():
    lines = [r for r in published("stage-a") if r["aux_lr"] in AUX]
    whole = [r for r in lines if r["steps"] == FULL[r["cell"]]]
    for cell in ("1k", "4k", "16k"):
        found = rows("stage-a", cell, "less Muon's loss, 95 %")
        muon = best(whole, cell, MUON)
        for method in found.keys() - {"less Muon's loss, 95 % interval", "---"}:
            rate = best(whole, cell, method)
            for column, times in enumerate((1, 2)):
                ours = losses(whole, cell, method, times * rate)
                theirs = losses(whole, cell, MUON, times * muon)
                assert found[method][column] == paired(ours, theirs)
    fewer = rows("stage-a", "4k", "less Muon's loss with")
    for method in (LEON, LEON3):
        ours = losses(lines, "4k", method, best(whole, "4k", method), int(0.9 * 2441))
        theirs = losses(whole, "4k", MUON, best(whole, "4k", MUON))
        assert paired(ours, theirs) in fewer[next(k for k in fewer if method in k)]


def test_the_picture_of_stage_a_has_leon_above_muon_where_its_loss_is_higher():
    stage, log = stages.A, Log(PUBLISHED)
    panels = figure(stage, [Results(stage, cell, log) for cell in stage.cells]).panels
    whole = [r for r in published("stage-a") if r["steps"] == FULL[r["cell"]]]
    lines = [r for r in whole if r["aux_lr"] in AUX]
    for series in panels[-1].series[:2]:
        for size, mean in zip(series.x, series.y, strict=True):
            cell = {1024: "1k", 4096: "4k", 16384: "16k"}[size]
            ours = losses(lines, cell, series.name, best(lines, cell, series.name))
            theirs = losses(lines, cell, MUON, best(lines, cell, MUON))
            assert mean == pytest.approx(fmean(ours.values()) - fmean(theirs.values()), abs=1e-9)
            assert mean > 0.01


def test_the_table_of_stage_b_is_what_scipy_makes_of_its_log():
    lines = published("stage-b")
    found = rows("stage-b", "4k", "less Muon's loss, 95 %")[LEON]
    for column, times in enumerate((0.5, 1, 2)):
        ours = losses(lines, "4k", LEON, times * 0.016)
        assert found[column] == paired(ours, losses(lines, "4k", MUON, times * 0.008))


def test_the_tables_of_stage_c_are_what_scipy_makes_of_its_log():
    lines = published("stage-c")
    for cell in {r["cell"] for r in lines}:
        found = rows("stage-c", cell, "less Muon's loss, 95 %")
        theirs = losses(lines, cell, MUON, best(lines, cell, MUON))
        for method in (ADAMW, LEON, LEON3):
            ours = losses(lines, cell, method, best(lines, cell, method))
            assert found[method][0] == paired(ours, theirs)


def test_the_table_of_stage_d_is_what_scipy_makes_of_the_logs():
    before = [r for r in published("stage-a") if r["aux_lr"] == 8e-3 and r["steps"] == 2441]
    lines = [*before, *published("stage-d")]
    page = (PUBLISHED / "stage-d.md").read_text()
    pairs = [(name, variant.of) for name, variant in stages.VARIANTS.items()]
    pairs += [("Leon, anew", "Muon, anew"), ("Leon, aux_lr 1e-3", "Leon, anew")]
    pairs += [("Muon, aux_lr 1e-3", f"Muon, {other}") for other in ("aux_lr 3e-4", "anew")]
    pairs += [("Leon, aux_lr 1e-3", "Muon, aux_lr 1e-3")]
    for variant, other in pairs:
        ours = losses(lines, "4k", variant, best(lines, "4k", variant))
        rate = best(lines, "4k", other)
        less = paired(ours, losses(lines, "4k", other, rate))
        twice = losses(lines, "4k", other, 2 * rate)
        beyond = paired(ours, twice) if len(twice) == 5 else "—"
        assert f"| {variant} | {other} at {rate} | {less} | {beyond} | 5 |" in page
