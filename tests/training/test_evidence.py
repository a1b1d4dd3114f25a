"""`nucleon bench evidence`: the rule that chooses runs, a run, the queue, its log, the report."""

import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import evidence_queue
import evidence_stages as stages
from evidence_corpus import Corpus, load, prepare, save, texts
from evidence_queue import Log, Queue, read, trial_of
from evidence_report import Results, interval, reached, report
from evidence_stages import ADAMW, LEON, LEON3, MUON, Cell, Part
from evidence_training import POINTS, Texts, Training, optimizer
from gpt import GPT, BytePairs, loss

SMALL = replace(
    stages.tiny(stages.A), methods=(MUON, LEON), cells=(Cell("4k", 2, (0.9,)),), tokens=24 * 32,
    seeds=2,
)  # fmt: skip
CPU = torch.device("cpu")
SCRIPT = Path(evidence_queue.__file__).with_name("evidence.py")


def learnable():
    """Bytes that follow one another by a rule, with some noise: something to learn."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(8, (24_000,), generator=generator)
    tokens = (7 * torch.arange(24_000) % 64 + (noise == 0) * noise.roll(1)).to(torch.int16)
    return Corpus(tokens[:20_000], tokens[20_000:20_500], ())


def corpora(folder):
    """A folder with a corpus of each name."""
    for name in ("novels.pt", "plays.pt", "programs.pt"):
        save(learnable(), folder / name)
    return folder


@pytest.fixture(scope="module")
def corpus():
    return learnable()


@pytest.fixture
def data(tmp_path):
    return corpora(tmp_path / "data")


# ------------------------------------------------------------------ the rule


def simulated(stage, loss, done=None):
    """The runs that the rule asks for, one after the other, with losses that a function gives."""
    done, order = dict(done or {}), []
    while True:
        left = [t for t in stages.wanted(stage, done.get) if t not in done]
        if not left:
            return done, order
        done[left[0]] = loss(left[0])
        order.append(left[0])


def bowl(trial, best=1e-3, aux=2e-3):
    away = math.log2(trial.rate / best) ** 2
    return 4 + 0.1 * away + (0.1 * math.log2((trial.aux_lr or aux) / aux) ** 2)


def test_stage_a_is_the_protocol():
    done, order = simulated(stages.A, bowl)
    assert [*dict.fromkeys(t.cell for t in order)] == ["4k", "16k", "1k"]
    assert ADAMW not in {t.method for t in order[: -3 * 13]}  # after what the question is about
    assert {t.steps * t.sequences * 256 for t in order if t.phase != "shorter"} == {
        10_000_000 // n * n for n in (1024, 4096, 16384)
    }
    # 2 more for aux_lr, the third being in the grid; 5 rates; 4 more seeds at two of them; at 4k a
    # fifth method.
    full = [t for t in order if t.phase != "shorter"]
    assert Counter(t.cell for t in full) == {"4k": 2 + 5 * 13, "16k": 4 * 13, "1k": 4 * 13}
    for method in stages.ALL:
        for rate in (1e-3, 2e-3):
            seeds = {t.seed for t in full if (t.method, t.rate, t.cell) == (method, rate, "1k")}
            assert seeds == set(range(5))
    assert {t.aux_lr for t in full if t.cell != "4k" and t.method != ADAMW} == {2e-3}
    shorter = [t for t in order if t.phase == "shorter"]
    assert Counter(t.method for t in shorter) == {LEON: 5, LEON3: 5}
    assert {t.steps for t in shorter} == {int(0.9 * stages.A.steps(stages.A.cells[0]))}
    assert len(done) == len(order)


@pytest.mark.parametrize("best", [6.25e-5, 1.6e-2])
def test_a_grid_is_extended_until_the_best_is_inside(best):
    done, _ = simulated(stages.A, lambda t: bowl(t, best=best))
    for cell in stages.A.cells:
        found = stages.best_rates(stages.A, cell, done.get)
        for method in stages.ALL:
            here = [t for t in done if (t.cell, t.method, t.seed) == (cell.name, method, 0)]
            rates = sorted(t.rate for t in here)
            assert found[method] == pytest.approx(best) and rates[0] < found[method] < rates[-1]


def test_a_grid_ends_at_some_time_and_runs_that_diverge_ask_for_smaller_rates():
    rates, best = stages.search((1.0, 2.0), lambda rate: -rate)
    assert len(rates) == 2 + stages.EXTENSIONS and best == rates[-1]
    rates, best = stages.search((1.0, 2.0, 4.0), lambda rate: math.inf if rate > 0.3 else 1.0)
    assert rates[0] < 0.3 and best == rates[0]
    assert stages.search((1.0, 2.0, 4.0), {1.0: 1.0, 2.0: 0.5}.get) == ([1.0, 2.0, 4.0], None)


def test_nothing_of_a_matrix_method_is_run_before_aux_lr_is_known():
    first = [*stages.wanted(stages.A, lambda _: None)]
    assert {t.method for t in first if t.phase == "grid"} == {ADAMW}
    assert [t.aux_lr for t in first if t.phase == "aux_lr"] == [5e-4, 2e-3, 8e-3]


def test_stage_b_takes_everything_from_a_and_tunes_nothing():
    assert [*stages.wanted(stages.B, lambda _: None)] == []
    done, _ = simulated(stages.A, lambda t: bowl(t) - 0.01 * (t.method == LEON3))
    _, order = simulated(stages.B, bowl, done)
    assert Counter((t.method, t.rate) for t in order) == {
        (method, rate): 3 for method in (MUON, LEON3) for rate in (5e-4, 1e-3, 2e-3)
    }
    assert {t.aux_lr for t in order} == {2e-3}


def test_stage_c_begins_with_adamw_s_best_model_of_a():
    done, _ = simulated(stages.A, bowl)
    assert stages.base(stages.C, lambda _: None) is None
    assert stages.base(stages.C, done.get).rate == 1e-3
    _, order = simulated(stages.C, lambda t: bowl(t, best=2.5e-4, aux=2.5e-4), done)
    pairs = {(cell.name, method) for cell in stages.C.cells for method in stages.ALL}
    assert {(t.cell, t.method) for t in order} == pairs
    alone = {t for t in order if t.method == ADAMW or t.adapter}
    assert all(t.aux_lr == (None if t in alone else t.rate) for t in order)


def test_stage_d_varies_one_thing_at_a_time_around_the_best_of_a():
    assert [*stages.wanted(stages.D, lambda _: None)] == []
    done, _ = simulated(stages.A, lambda t: bowl(t, best=2e-3 if t.method == MUON else 4e-3))
    _, order = simulated(stages.D, lambda t: bowl(t, best=0.016), done)
    for name, variant in stages.VARIANTS.items():
        own = [t for t in order if t.method == name]
        best = (2e-3 if variant.of == MUON else 4e-3) * variant.rates
        assert [t.rate for t in own[:3]] == pytest.approx([best / 2, best, 2 * best])
        assert {t.aux_lr for t in own} == {variant.aux_lr or 2e-3}
        assert {t.seed for t in own if t.rate == pytest.approx(0.016)} == {0, 1, 2, 3, 4}
        assert min(t.rate for t in own) < 0.016 < max(t.rate for t in own)
    model = GPT(256, context=16, layers=1, heads=1, width=32)

    def options(method):
        made = stages.trial(stages.D, stages.D.cells[0], method, 1e-3, 2e-3, 0, "")
        matrices = optimizer(made, model, 256).param_groups[0]
        return {k: matrices[k] for k in ("momentum", "nesterov", "scale")}

    for name, variant in stages.VARIANTS.items():
        usual = {**stages.MATRIX_OPTIONS, "nesterov": variant.of == MUON}
        assert options(name) == {**usual, **variant.options}


# ------------------------------------------------------------------ a run


@pytest.mark.parametrize("method", [ADAMW, MUON, LEON3])
def test_a_run_is_the_plain_loop(corpus, method):
    """Rates and batches from tensors on the device, against a loop written out."""
    stage, found = SMALL, Texts(corpus, 16, CPU)
    trial = stages.trial(stage, stage.cells[0], method, 4e-3, 2e-3, 1, "grid")
    run = Training(stage, trial, found)
    while not run.over:
        run.advance()
    torch.manual_seed(trial.seed)
    model = GPT(256, context=16, layers=1, heads=1, width=32)
    other = optimizer(trial, model, 16)
    places = found.places(trial.steps * 2, trial.seed).view(-1, 2)

    def batch(step):
        windows = torch.stack([corpus.tokens[p : p + 17] for p in places[step]]).long()
        return windows[:, :-1], windows[:, 1:]

    rates = [group["lr"] for group in other.param_groups]
    for step in range(trial.steps):
        factor = (step + 1) / 2 if step < 2 else 1 - (step - 2) / (trial.steps - 2)
        for group, rate in zip(other.param_groups, rates, strict=True):
            group["lr"] = factor * rate
        loss(model, *batch(step)).backward()
        other.step()
        other.zero_grad()
    for mine, theirs in zip(run.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    results = run.results()
    assert results["status"] == "ok" and len(results["losses"]) == POINTS
    assert results["losses"][-1] == [trial.steps, results["final_loss"]]
    assert results["final_loss"] < results["losses"][0][1] - 0.02
    assert ("smoothing_share_half" in results) == (method == LEON3)


def test_the_methods_have_the_options_of_the_protocol():
    model = GPT(256, context=16, layers=1, heads=1, width=32)
    made = {
        m: optimizer(stages.trial(stages.A, stages.A.cells[0], m, 1e-3, 2e-3, 0, ""), model, 256)
        for m in stages.ALL
    }
    beta2 = 0.95**0.25  # a quarter of 16,384 tokens per step
    for method, found in made.items():
        matrices, rest = found.param_groups[0], found.param_groups[-1]
        assert rest["betas"] == (0.9, pytest.approx(beta2)) and rest["weight_decay"] == 0
        if method != ADAMW:
            assert (matrices["lr"], rest["lr"]) == (1e-3, 2e-3)
            assert (matrices["momentum"], matrices["scale"]) == (0.95, "match-adamw")
    assert made[MUON].param_groups[0]["nesterov"] and not made[LEON].param_groups[0]["nesterov"]
    assert [made[m].param_groups[0]["smoothing_scale"] for m in (LEON, LEON3)] == [1.0, 3.0]


def test_adapters_leave_the_model_as_it_is_and_train_nothing_else(corpus):
    stage, found = stages.tiny(stages.C), Texts(corpus, 16, CPU)
    cell = stage.cell("LoRA, 4")
    trial = replace(stages.trial(stage, cell, LEON, 1e-2, None, 0, ""), steps=4)
    start = GPT(256, context=16, layers=1, heads=1, width=32).state_dict()
    start = {name: value.clone() for name, value in start.items()}
    run = Training(stage, trial, found, weights=start)
    while not run.over:
        run.advance()
    now = {k.replace(".linear.", "."): v for k, v in run.model.state_dict().items()}
    assert all(torch.equal(now[name], value) for name, value in start.items())
    moved = [v for k, v in now.items() if k.endswith(".up.weight") and k not in start]
    assert len(moved) == 6 and all(v.abs().max() > 0 for v in moved)


# ------------------------------------------------------------------ the queue and its log


def queue(log, data, stage=SMALL, **options):
    options = {"jobs": 2, "seconds": 600.0, "say": lambda _: None, **options}
    todo = [Part("all", stage)] if isinstance(stage, stages.Stage) else stage
    return Queue(todo, log, data, CPU, **options)


@pytest.mark.slow
def test_the_queue_does_all_that_the_rule_asks_for_and_nothing_twice(data, tmp_path):
    log = Log(tmp_path / "log")
    found = queue(log, data)
    assert found.work() and found.left() == 0
    trials = [trial_of(r) for r in read(log.path("A"))]
    assert len(trials) == len(set(trials)) == len({*stages.wanted(SMALL, log.loss)})
    again = queue(Log(log.folder), data)
    assert again.left() == 0 and again.work()
    assert len(read(log.path("A"))) == len(trials)
    report(log.folder, {"A": SMALL})
    assert (log.folder / "stage-a.svg").stat().st_size > 5000
    assert f"{len(trials)} lines" in (log.folder / "stage-a.md").read_text()


@pytest.mark.slow
def test_a_run_that_fails_is_logged_tried_once_more_and_stops_nothing(data, tmp_path, monkeypatch):
    made = []

    class Fragile(Training):
        def __init__(self, stage, trial, texts, **options):
            made.append((trial, options["capture"]))
            if trial.aux_lr == 5e-4:
                raise RuntimeError("out of luck\nand more")
            super().__init__(stage, trial, texts, **options)

        def advance(self):
            if self.trial.seed == 1 and [t for t, _ in made].count(self.trial) == 1:
                raise RuntimeError("half way")
            super().advance()

    monkeypatch.setattr(evidence_queue, "Training", Fragile)
    log = Log(tmp_path)
    assert queue(log, data).work()
    records = read(log.path("A"))
    failed = [r for r in records if r["status"] == "failed"]
    assert {r["error"] for r in failed} == {"RuntimeError: out of luck", "RuntimeError: half way"}
    never = [r for r in records if r["aux_lr"] == 5e-4]
    assert [r["status"] for r in never] == ["failed"] * 2
    assert log.loss(trial_of(never[0])) == math.inf
    retried = [t for t, captured in made if not captured]
    assert {t.seed for t in retried if t.aux_lr != 5e-4} == {1}
    assert all(log.loss(t) is not None and log.loss(t) < 9 for t in retried if t.seed == 1)


def test_a_lost_device_ends_the_process_s_work(data, tmp_path, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(evidence_queue, "Training", lost)
    log = Log(tmp_path)
    assert not queue(log, data).work()
    assert [r["status"] for r in read(log.path("A"))] == ["failed"]


@pytest.mark.parametrize("given", [["--budget", "9"], ["--budget=9"], []])
def test_another_process_goes_on_with_the_time_that_is_left(given, monkeypatch):
    begun = []
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--stage", "A", *given, "--jobs", "4"])
    monkeypatch.setattr(os, "execv", lambda program, words: begun.append((program, words)))
    evidence_queue.restart(90.0)
    words = ["evidence.py", "--stage", "A", "--jobs", "4", "--budget=1.500"]
    assert begun == [(sys.executable, [sys.executable, *words])]


def test_no_run_begins_that_would_not_end_in_time(data, tmp_path):
    log = Log(tmp_path)
    assert queue(log, data, seconds=0.0).work() and not log.records
    slow = queue(log, data, seconds=100.0)
    trial = next(iter(stages.wanted(SMALL, log.loss)))
    assert slow.expected(SMALL, trial) is None
    log.append(slow._record(trial, {"status": "ok", "final_loss": 5.0, "seconds": 99.0}))
    following = next(t for t in stages.wanted(SMALL, log.loss) if log.loss(t) is None)
    assert slow.expected(SMALL, following) == pytest.approx(1.15 * 99.0)
    assert slow.work() and len(read(log.path("A"))) == 1


def test_half_a_line_is_not_a_run_and_goes_with_the_next_one(data, tmp_path):
    log = Log(tmp_path)
    maker, trials = queue(log, data), [*stages.wanted(SMALL, log.loss)]
    log.append(maker._record(trials[0], {"status": "ok", "final_loss": 5.0, "seconds": 1.0}))
    with log.path("A").open("a") as opened:
        opened.write('{"stage": "A", "ce')
    again = Log(tmp_path)
    assert [trial_of(r) for r in again.records] == trials[:1]
    again.append(maker._record(trials[1], {"status": "diverged", "final_loss": math.nan}))
    assert [trial_of(r) for r in read(log.path("A"))] == trials[:2]
    assert Log(tmp_path).loss(trials[1]) == math.inf


@pytest.mark.slow
def test_fine_tuning_begins_with_the_trained_model(data, tmp_path):
    before = replace(SMALL, methods=(ADAMW,), seeds=1, multiples=(), rates=(2e-3, 4e-3, 8e-3))
    stage = replace(
        stages.tiny(stages.C), before=before, methods=(ADAMW, LEON), seeds=1, tokens=16 * 8,
        cells=(Cell("full, 4", 1), Cell("LoRA, 4", 1, adapter=True)),
    )  # fmt: skip
    first = Log(tmp_path)
    assert queue(first, data, stage).left() == 0  # nothing to begin with
    queue(first, data, before).work()
    log, said = Log(tmp_path), []
    assert queue(log, data, stage, say=said.append).work()
    own = read(log.path("C"))
    assert {(r["cell"], r["method"]) for r in own} == {
        (c.name, m) for c in stage.cells for m in stage.methods
    }
    base = first.loss(stages.base(stage, first.loss))
    assert min(r["final_loss"] for r in own) < base + 0.05  # begun anew it would be ln 256
    (start,) = {r["start"] for r in own}
    assert said[0].endswith(f"loss {base:.4f}, hash {start}")


# ------------------------------------------------------------------ corpus and report


def test_a_corpus_is_what_was_saved_and_holds_out_what_it_says(tmp_path):
    text = "".join(f"line {i} of a text\n" for i in range(3000))
    (tmp_path / "text.txt").write_text(text)
    found = prepare(tmp_path / "text.txt", 300)
    save(found, tmp_path / "corpus.pt")
    again = load(tmp_path / "corpus.pt")
    assert again.fingerprint == found.fingerprint and again.vocabulary <= 300
    tokenizer = BytePairs(again.merges)
    pieces = [bytes([byte]) for byte in range(256)]
    for pair in tokenizer.merges:
        pieces.append(b"".join(pieces[token] for token in pair))
    both = b"".join(pieces[t] for t in (*again.tokens, *again.held_out)).decode()
    assert both == text
    for i in range(50):
        (tmp_path / f"{i:02d}.py").write_text(f"x = {i}\n")
    assert texts(tmp_path)[1] == "x = 24\nx = 49\n"


def test_intervals_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = [-0.01, -0.02, 0.005, -0.015, -0.03]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = interval(values)
    assert found.mean - found.margin == pytest.approx(expected.low)
    assert found.mean + found.margin == pytest.approx(expected.high)
    assert str(interval([])) == "—" and str(interval([0.25])) == "0.2500"


def test_a_curve_reaches_a_loss_between_two_points():
    curve = [(10.0, 5.0), (20.0, 4.0), (30.0, 3.0)]
    assert reached(curve, 3.5) == 25.0 and reached(curve, 5.5) == 10.0
    assert reached(curve, 3.0) == 30.0 and reached(curve, 2.9) == math.inf


def test_the_report_pairs_the_seeds(tmp_path):
    """Losses whose noise is of the seed alone: the difference of two methods has none."""
    stage, log = replace(SMALL, seeds=3), Log(tmp_path)

    def loss(trial):
        shift = {MUON: 0.0, LEON: -0.02}[trial.method] + 0.05 * (trial.steps < 24)
        return bowl(trial) + 0.3 * trial.seed + shift

    _, order = simulated(stage, loss)
    for trial in order:
        fixed = {"jobs": 2, "device": "cpu", "torch": "2", "seconds": 6.0, "status": "ok"}
        fixed["when"] = "2026-01-01T00:00:06+00:00"
        curve = [[12, loss(trial) + 1.0], [24, loss(trial)]]
        log.append({**vars(trial), **fixed, "final_loss": loss(trial), "losses": curve})
    found = Results(stage, stage.cells[0], log)
    less = found.difference(LEON, 1e-3, MUON, 1e-3)
    assert less.count == 3 and less.mean == pytest.approx(-0.02) and less.margin < 1e-9
    assert found.steps_to_reach(LEON) == pytest.approx([(24 - 12 * 0.02) / 24] * 3)
    report(tmp_path, {"A": stage, "B": stages.B})
    page = (tmp_path / "stage-a.md").read_text()
    assert "| Leon c=1 | -0.0200 ± 0.0000 | -0.0200 ± 0.0000 |" in page
    assert "| Leon c=1, 0.9 of the steps | 0.0300 ± 0.0000 | 3 |" in page
    assert f"{len(order)} lines: {len(order)} runs ended well" in page and "0.002 (chosen)" in page
