"""Every claim: the quick run holds and is complete, is determined by its settings, and can fail."""

import dataclasses
import functools
import math

import pytest
import torch

from nucleon._files import to_json
from nucleon.claims import CLAIMS, Settings, Silent, grid
from nucleon.claims.applications import app_rotations
from nucleon.claims.games import (
    ftl_linear,
    high_probability,
    lemma_decomposition,
    remark_unknown_bound,
    tab_shampoo,
    thm_faml,
    thm_ftpl,
    thm_gbpa,
    tightness,
)
from nucleon.claims.inequalities import (
    lemmas_shampoo,
    lemmas_wishart,
    prop_admissibility,
    prop_tradeoff,
)
from nucleon.claims.processes import average_schedule, fig_ripples, o2nc, thm_average, thm_leon
from nucleon.online import theory
from nucleon.online.learners import FAML, FTL, FTPL, GBPA, AdaGradFTRL, OneSidedShampoo
from nucleon.online.potentials import Admissibility, Hyperbolic
from nucleon.online.theory import Sides

F64 = torch.float64
LONG = ("app-training", "app-quasi-newton")
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

    short = functools.partial(grid.swung, rounds=grid.SWING_ROUNDS // 10)
    patch.setattr(grid, "_played", few)
    for module in (grid, remark_unknown_bound, tab_shampoo):
        patch.setattr(module, "swung", short)
    for module in (grid, tightness):
        patch.setattr(module, "worst_streams", small)
    for module, settings in SHORT.items():
        for name, value in settings.items():
            patch.setattr(module, name, value)


@functools.cache
def brief(name, rounds=6, first_seed=0):
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, rounds)
        return CLAIMS[name].run(Settings(True, 2, first_seed), Silent())


@pytest.mark.parametrize("name", [n for n in CLAIMS if n not in (*LONG, *TIMED)])
def test_a_run_is_determined_by_its_settings(name, monkeypatch):
    one, other = brief(name), brief(name, first_seed=3)
    shorten(monkeypatch)
    two = CLAIMS[name].run(Settings(True, 2), Silent())
    first, again, apart = (list(map(to_json, result.records)) for result in (one, two, other))
    assert first == again != apart
    assert repr(one.checks) == repr(two.checks)  # not ==: a NaN is not itself


# ---- can fail ----------------------------------------------------------------------------------


def leader(shape, **options):
    """Follow-the-leader with FAML's bound to its name."""
    learner = FTL(shape, **{k: v for k, v in options.items() if k != "eta"})
    learner.constants = Admissibility(1.0, 1.0)
    return learner


def learners(module, **changes):
    """Put other learners in the place of those of a grid."""

    def put_in(patch):
        changed = dataclasses.replace(module.GRID, learners={**module.GRID.learners, **changes})
        patch.setattr(module, "GRID", changed)

    return put_in


def ftpl_is_answered(patch):
    for name, stream, source in (
        ("OBLIVIOUS", "alternating", grid.NINE["greedy"]),
        ("ADAPTIVE", "adversary", grid.NINE["gaussian"]),
    ):
        games = getattr(thm_ftpl, name)
        patch.setattr(thm_ftpl, name, dataclasses.replace(games, streams={stream: source}))


def decomposed_with(**options):
    def put_in(patch):
        patch.setitem(lemma_decomposition.LEARNERS, "FAML", functools.partial(FAML, **options))

    return put_in


def understated(patch):
    patch.setattr(Hyperbolic, "admissibility", lambda self, m, n: Admissibility(0.8, 0.8))


def scaled_right(name, factor):
    """Scale the library's right side."""

    def put_in(patch):
        exact = getattr(theory, name)

        def wrong(*arguments, **options):
            left, right = exact(*arguments, **options)
            return Sides(left, factor * right)

        patch.setattr(theory, name, wrong)

    return put_in


def scaled(name, factor, of=theory):
    def put_in(patch):
        exact = getattr(of, name)
        patch.setattr(of, name, lambda *a, **k: factor * exact(*a, **k))

    return put_in


def width_off_by_one(patch):
    """1/(n−m) in the place of 1/(n−m−1)."""
    exact = theory.inverse_wishart

    def wrong(shift, noise):
        left, right = exact(shift, noise)
        m, n = shift.shape[-2:]
        return Sides(left, torch.full_like(right, 1 / (n - m)))

    patch.setattr(theory, "inverse_wishart", wrong)


def unclipped(patch):
    """Clipping that feeds the gradient whole."""
    exact = AdaGradFTRL._fed

    def wrong(self, gradient, size):
        return gradient, exact(self, gradient, size)[1]

    patch.setattr(AdaGradFTRL, "_fed", wrong)


def without_a_deviation(patch):
    for learner in (GBPA, FTPL):
        patch.setattr(learner, "_deviation", lambda self, oblivious, delta: 0.0)


def without_an_excess(patch):
    """A bound of GBPA that forgets what exceeded the level in force."""
    exact = GBPA._within_bound

    def wrong(self, gradient):
        fed, level, excess = exact(self, gradient)
        return fed, level, torch.zeros_like(excess)

    patch.setattr(GBPA, "_within_bound", wrong)


def without_the_second_sum(patch):
    def wrong(losses, *, discount):
        steps = losses.diff()
        powers = discount ** torch.arange(len(steps) - 1, -1, -1, dtype=F64)
        return Sides(losses[-1] - losses[0], (powers * steps).sum())

    patch.setattr(theory, "loss_decomposition", wrong)


FTPL_GROWS = {f"adversary, k = {k}: exponent of the regret" for k in (1, 4, 16)}
FAULTS = [
    ("ftl-linear", learners(ftl_linear, FTL=FAML), 25, {"FTL: exponent of the regret"}),
    (
        "ftl-linear",
        learners(ftl_linear, FAML=leader),
        25,
        {
            "FAML: exponent of the regret",
            "all but FTL: largest mean regret over its bound",
        },
    ),
    (
        "lemma-decomposition",
        decomposed_with(eta=1.3),
        6,
        {"FTL, FTPL, FAML: largest |regret − sum of the terms|/regret"},
    ),
    (
        "lemma-decomposition",
        understated,
        6,
        {
            "FTRL, FAML: largest (term − bound − gap)/(D·G·m)",
            "FAML: terms and their bounds against the reference's, over D·G·m",
        },
    ),
    ("thm-gbpa", learners(thm_gbpa, FAML=leader), 25, {"FAML: largest regret/bound"}),
    (
        "thm-faml",
        learners(thm_faml, FAML=leader),
        25,
        {
            "largest regret/printed bound",
            "largest regret/Theorem 3.2",
            "largest exponent on alternating, greedy, orthogonal",
            "certificates that hold, share",
        },
    ),
    (
        "thm-faml",
        learners(thm_faml, FAML=functools.partial(FAML, eta=1.01)),
        25,
        {"a row, regret against the closed form"},
    ),
    ("thm-ftpl", ftpl_is_answered, 120, {"certificates given against the adversary", *FTPL_GROWS}),
    ("tightness", scaled("gbpa_bound", 0.8), 6, {"distance to the file/margin"}),
    ("tightness", scaled("gbpa_bound", 4.0), 6, {"distance to the file/margin"}),
    ("tightness", scaled("_act", -1.0, of=GBPA), 6, {"largest regret/bound"}),
    (
        "tab-shampoo",
        scaled("bound", 0.5, of=OneSidedShampoo),
        20,
        {"one-sided: largest regret/bound"},
    ),
    ("tab-adagrad", scaled("adagrad_bound", 0.5), 40, {"OGD on ℓ2: largest regret/bound"}),
    *(
        ("lemmas-shampoo", scaled_right(name, factor), 6, set())
        for name in (
            "matrix_potential",
            "shampoo_gradient_term",
            "shampoo_distance_term",
            "mirror_descent_regret",
        )
        for factor in (0.9, 1.1)
    ),
    *(
        ("lemmas-wishart", scaled_right(name, factor), 6, set())
        for name in ("nuclear_hessian", "inverse_chi_square")
        for factor in (0.9, 1.1)
    ),
    ("lemmas-wishart", width_off_by_one, 6, set()),
    ("lemma-discounting", without_the_second_sum, 6, {"|left − right|/size, largest"}),
    ("remark-unknown-bound", scaled("scale_free_adagrad_bound", 0.9), 6, set()),
    ("remark-unknown-bound", scaled("adagrad_bound", 1.1), 6, set()),
    ("remark-unknown-bound", unclipped, 6, set()),
    ("remark-unknown-bound", without_an_excess, 6, set()),
    ("high-probability", without_a_deviation, 6, {"fixed: largest quantile/term"}),
    ("high-probability", scaled("ftpl_oblivious_deviation", 0.5), 6, set()),
    ("high-probability", scaled("ftpl_oblivious_deviation", 2.0), 6, set()),
    ("high-probability", scaled("ftpl_adaptive_deviation", 0.5), 6, set()),
    ("prop-tradeoff", scaled_right("admissibility_tradeoff", 0.9), 6, set()),
]
"""Claim, fault, rounds, and checks that must fail; that of any other is enough where none is named.

`make sabotage` has the faults of the mathematics, for every claim.
"""


@pytest.mark.parametrize(("name", "fault", "rounds", "noticed"), FAULTS)
def test_a_claim_can_fail(name, fault, rounds, noticed, monkeypatch):
    """It fails a check that passes without the fault."""
    right = brief(name, rounds)
    shorten(monkeypatch, rounds)
    fault(monkeypatch)
    wrong = CLAIMS[name].run(Settings(True, 2), Silent())
    missed = failed(wrong) - failed(right)
    assert missed and noticed <= missed
