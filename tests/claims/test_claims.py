"""Every claim: the quick run holds and is complete, is determined by its settings, and can fail."""

import dataclasses
import functools
import math

import pytest
import torch

from nucleon._files import to_json
from nucleon.claims import CLAIMS, Settings, Silent, grid
from nucleon.claims.games import thm_faml, thm_ftpl, thm_gbpa
from nucleon.online.learners import FAML, FTL
from nucleon.online.potentials import Admissibility

F64 = torch.float64
LONG = ("thm-pion", "app-training", "cost-model")
TIMED = ("cost-model", "projection-cost")
"""Claims on times, which no seed determines."""


class Counter:
    total = done = 0

    def begin(self, total, unit):
        self.total += total

    def advance(self, amount, stage):
        self.done += amount


@functools.cache
def quick(name):
    counter = Counter()
    return CLAIMS[name].run(Settings(quick=True), counter), counter


def failed(result):
    return {check.name for check in result.checks if not check.passed}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_quick_claim_holds_and_is_complete(name):
    result, counter = quick(name)
    assert result.passed, failed(result)
    assert counter.done == counter.total > 0
    assert result.tables and result.figures and result.records and result.notes
    assert len({check.name for check in result.checks}) == len(result.checks)
    for table in result.tables:
        assert table.rows and {len(row) for row in table.rows} == {len(table.columns)}
    for figure in result.figures:
        for panel in figure.panels:
            assert panel.x_label and panel.y_label and panel.series
            for series in panel.series:
                assert len(series.x) == len(series.y) > 0
                assert all(map(math.isfinite, series.y))


# ---- determined --------------------------------------------------------------------------------


def shorten(patch, rounds):
    """Play few rounds, a tenth of the swing and one of the worst streams: too little to pass."""
    played, kept = grid._played, grid.worst_streams
    few = lambda run, match: played(run, match._replace(rounds=min(rounds, match.rounds)))  # noqa: E731
    patch.setattr(grid, "_played", few)
    patch.setattr(grid, "swung", functools.partial(grid.swung, rounds=grid.SWING_ROUNDS // 10))
    patch.setattr(grid, "worst_streams", lambda run, learner: kept(run, learner)[:1])


@pytest.mark.parametrize("name", [n for n in CLAIMS if n not in (*LONG, *TIMED)])
def test_a_run_is_determined_by_its_settings(name, monkeypatch):
    shorten(monkeypatch, 6)
    run = functools.partial(CLAIMS[name].run, progress=Silent())
    one, two, other = (run(Settings(quick=True, seeds=2, first_seed=seed)) for seed in (0, 0, 3))
    first, again, apart = (list(map(to_json, result.records)) for result in (one, two, other))
    assert first == again != apart
    assert one.checks == two.checks


# ---- can fail ----------------------------------------------------------------------------------


def leader(shape, **options):
    """Follow-the-leader with FAML's bound to its name."""
    learner = FTL(shape, **{k: v for k, v in options.items() if k != "eta"})
    learner.constants = Admissibility(1.0, 1.0)
    return learner


def with_learners(patch, module, name="GRID", **changes):
    games = getattr(module, name)
    learners = {**games.learners, **changes}
    patch.setattr(module, name, dataclasses.replace(games, learners=learners))


def gbpa_leads(patch):
    with_learners(patch, thm_gbpa, FAML=leader)


def faml_leads(patch):
    with_learners(patch, thm_faml, FAML=leader)


def faml_steps_further(patch):
    with_learners(patch, thm_faml, FAML=functools.partial(FAML, eta=1.01))


def ftpl_is_answered(patch):
    fixed, answering = thm_ftpl.OBLIVIOUS, grid.NINE["greedy"]
    shown = dataclasses.replace(fixed, streams={"alternating": answering})
    patch.setattr(thm_ftpl, "OBLIVIOUS", shown)
    hidden = {"adversary": grid.NINE["gaussian"]}
    patch.setattr(thm_ftpl, "ADAPTIVE", dataclasses.replace(thm_ftpl.ADAPTIVE, streams=hidden))


FAULTS = {
    "thm-gbpa": [(25, gbpa_leads, {"FAML: largest regret/bound"}, {"FTRL: largest regret/bound"})],
    "thm-faml": [
        (
            25,
            faml_leads,
            {
                "largest regret/printed bound",
                "largest regret/Theorem 3.2",
                "largest exponent on alternating, greedy, orthogonal",
                "certificates that hold, share",
            },
            {"largest ‖X_t‖_op/D − 1"},
        ),
        (
            25,
            faml_steps_further,
            {"a row, regret against the closed form"},
            {"largest regret/printed bound"},
        ),
    ],
    "thm-ftpl": [
        (
            120,
            ftpl_is_answered,
            {
                "fixed streams: mean regret/Theorem 3.2, upper end",
                "certificates given against the adversary",
                *(f"adversary, k = {k}: exponent of the regret" for k in (1, 4, 16)),
            },
            {"square without padding: bounds given"},
        )
    ],
}
"""Claim, rounds, fault, the checks that fail with it, and those that do not."""


@pytest.mark.parametrize(
    ("name", "rounds", "fault", "noticed", "sound"),
    [
        pytest.param(name, *case, id=f"{name}-{case[1].__name__}")
        for name, made in FAULTS.items()
        for case in made
    ],
)
def test_a_claim_can_fail(name, rounds, fault, noticed, sound, monkeypatch):
    shorten(monkeypatch, rounds)
    fault(monkeypatch)
    missed = failed(CLAIMS[name].run(Settings(quick=True, seeds=2), Silent()))
    assert noticed <= missed and not sound & missed
