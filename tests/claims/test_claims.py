"""Every claim: the quick run holds and is complete, is determined by its settings, and can fail."""

import functools
import math
import sys
from pathlib import Path

import pytest

from nucleon._files import to_json
from nucleon.claims import CLAIMS, Settings, grid
from nucleon.claims.applications import app_rotations
from nucleon.claims.games import (
    high_probability,
    lemma_decomposition,
    remark_unknown_bound,
    tab_shampoo,
    thm_ftpl,
    tightness,
)
from nucleon.claims.inequalities import (
    lemmas_shampoo,
    lemmas_wishart,
    prop_admissibility,
    prop_tradeoff,
)
from nucleon.claims.processes import average_schedule, fig_ripples, o2nc, thm_average, thm_leon

sys.path.append(str(Path(__file__).parents[1] / "sabotage"))

import faults  # noqa: F401  (enters its rows)
from fault import planted

LONG = ("app-training", "app-quasi-newton")
TIMED = ("cost-model", "projection-cost")
"""Claims on times, which no seed determines."""


class Counter:
    total = done = 0

    def begin(self, total):
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


PLAN = thm_leon.plan


def thirty_rounds(*arguments, **options):
    """A plan of few rounds."""
    plan = PLAN(*arguments, **options)
    object.__setattr__(plan.complexity, "rounds", 30)
    return plan


SEARCH = ({"starts": 2, "steps": 4, "replicates": 8},) * 2
SHORT = {
    remark_unknown_bound: {"LENGTHS": ((30,), (30,)), "ROUNDS": (10, 10), "GAMES": (8, 8)},
    high_probability: {"ROUNDS": (6, 6), "ADAPTIVE_ROUNDS": (15, 15)},
    tightness: {"SIGNS": (1000, 1000)},
    lemma_decomposition: {"ROUNDS": (3, 3), "STREAMS": {"alternating": grid.NINE["alternating"]}},
    thm_ftpl: {"WIDTH_SAMPLES": (64, 64)},
    tab_shampoo: {"SIDES": ((2,), (2,)), "HORIZONS": ((8, 16), (8, 16))},
    lemmas_shampoo: {"SHAPES": ((1, 1), (2, 3))},
    lemmas_wishart: {"HESSIAN_SHAPES": ((1, 1), (2, 3)), "SAMPLES": (800, 800)},
    prop_tradeoff: {"MIXTURES": (1, 1), "SEARCH": SEARCH},
    prop_admissibility: {"SEARCH": SEARCH, "CURVE_SAMPLES": 8},
    fig_ripples: {"STEPS": 6},
    thm_leon: {"plan": thirty_rounds},
    o2nc: {"ROUNDS": (60, 60), "LENGTHS": (500, 500)},
    thm_average: {"ROUNDS": (20, 20), "RUNS": (20, 20), "HORIZON": 200},
    average_schedule: {"CURVATURES": 100, "STEPS": (50, 50), "CONVEX_STEPS": (50, 50)}
    | {"KINK_STEPS": (100, 400), "KINK_RUNS": (50, 50)},
    app_rotations: {"ROUNDS": (20, 20), "HIGH_ROUNDS": (10, 10)},
}


def shorten(patch, rounds=6):
    """Play few rounds, a tenth of the swing, small worst streams: too little for all to pass."""
    played, kept = grid._played, grid.worst_streams

    def few(run, match):
        return played(run, match._replace(rounds=min(rounds, match.rounds)))

    def small(run, learner):
        return [case for case in kept(run, learner) if case.shape == (1, 1)]

    patch.setattr(grid, "_played", few)
    patch.setattr(grid, "worst_streams", small)
    patch.setattr(grid, "SWING_ROUNDS", grid.SWING_ROUNDS // 10)
    for module, settings in SHORT.items():
        for name, value in settings.items():
            patch.setattr(module, name, value)


@functools.cache
def brief(name, rounds=6, first_seed=0):
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, rounds)
        return CLAIMS[name].run(Settings(True, 2, first_seed))


@pytest.mark.parametrize("name", [n for n in CLAIMS if n not in (*LONG, *TIMED)])
def test_a_run_is_determined_by_its_settings(name, monkeypatch):
    one, other = brief(name), brief(name, first_seed=3)
    shorten(monkeypatch)
    two = CLAIMS[name].run(Settings(True, 2))
    first, again, apart = (list(map(to_json, result.records)) for result in (one, two, other))
    assert first == again != apart
    assert repr(one.checks) == repr(two.checks)  # not ==: a NaN is not itself


# ---- can fail ----------------------------------------------------------------------------------

FAULTS = [
    (
        "ftl-linear",
        "FAML follows the leader",
        25,
        {"FAML: exponent of the regret", "all but FTL: largest mean regret over its bound"},
    ),
    ("ftl-linear", "FTL plays S/‖S‖_F", 6, set()),
    ("lemma-decomposition", "M̂ discounted by γ, not γ²", 6, set()),
    (
        "lemma-decomposition",
        "Hyperbolic α = β = 0.8",
        6,
        {
            "FTRL, FAML: largest (term − bound − gap)/(D·G·m)",
            "FAML: terms and their bounds against the reference's, over D·G·m",
        },
    ),
    ("thm-gbpa", "FAML follows the leader", 25, {"FAML: largest regret/bound"}),
    (
        "thm-faml",
        "FAML follows the leader",
        25,
        {
            "largest regret/printed bound",
            "largest regret/Theorem 3.2",
            "largest exponent on alternating, greedy, orthogonal",
            "certificates that hold, share",
            "a row, regret against the closed form",
        },
    ),
    (
        "thm-ftpl",
        "the adversary is a Gaussian stream",
        120,
        {
            "certificates given against the adversary",
            *(f"adversary, k = {k}: exponent of the regret" for k in (1, 4, 16)),
        },
    ),
    ("tightness", "the GBPA bound × 0.8", 6, {"distance to the file/margin"}),
    ("tightness", "the GBPA bound × 4", 6, {"distance to the file/margin"}),
    (
        "tab-shampoo",
        "one-sided Shampoo's bound with the diameter D",
        20,
        {"one-sided: largest regret/bound"},
    ),
    ("tab-adagrad", "AdaGrad's bounds halved", 40, {"OGD on ℓ2: largest regret/bound"}),
    ("lemmas-shampoo", "Lemma C.3 without its factor 2", 6, set()),
    ("lemmas-shampoo", "Lemma C.4 × 0.9", 6, set()),
    ("lemmas-shampoo", "Lemma C.5 with the radius for the diameter", 6, set()),
    ("lemmas-shampoo", "Proposition C.2 × 1.1", 6, set()),
    ("lemmas-wishart", "Lemma E.1 × 0.9", 6, set()),
    ("lemmas-wishart", "Lemma E.2 with 1/k", 6, set()),
    ("lemmas-wishart", "Lemma E.3 with 1/(n−m)", 6, set()),
    (
        "lemma-discounting",
        "Lemma G.2 without its second sum",
        6,
        {"|left − right|/size, largest"},
    ),
    ("remark-unknown-bound", "the scale-free bound × 0.9", 6, set()),
    ("remark-unknown-bound", "AdaGrad's bounds halved", 6, set()),
    ("remark-unknown-bound", "AdaGrad clips nothing", 6, set()),
    ("remark-unknown-bound", "what exceeds the bound costs nothing", 6, set()),
    (
        "high-probability",
        "a certificate without the deviation",
        6,
        {"fixed: largest quantile/term"},
    ),
    ("high-probability", "the oblivious deviation halved", 6, set()),
    ("high-probability", "the adaptive deviation halved", 6, set()),
    ("prop-tradeoff", "the ceiling of αβ ≥ ½ with β, not β/2", 6, set()),
]
"""Claim, fault of the sabotage table, rounds, and checks that must fail; one at least does."""


@pytest.mark.parametrize(("name", "fault", "rounds", "noticed"), FAULTS)
def test_a_claim_can_fail(name, fault, rounds, noticed, monkeypatch):
    """It fails a check that passes without the fault."""
    right = brief(name, rounds)
    shorten(monkeypatch, rounds)
    with planted(fault):
        wrong = CLAIMS[name].run(Settings(True, 2))
    missed = failed(wrong) - failed(right)
    assert missed and noticed <= missed
