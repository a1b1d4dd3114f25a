"""The engine: rows, tables, runs, and what the games of the claims share."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from nucleon.claims import CLAIMS, Settings, engine, grid
from nucleon.claims.engine import (
    Check,
    Claim,
    Result,
    Row,
    Rows,
    Run,
    above,
    at_least,
    at_most,
    below,
)
from nucleon.claims.games import tab_shampoo, thm_ftpl, thm_gbpa, tightness
from nucleon.claims.inequalities import prop_admissibility
from nucleon.online import streams
from nucleon.online.admissibility import search_admissibility
from nucleon.online.learners import FAML, FTRL, AdaGradOGD, Shampoo
from nucleon.online.potentials import Admissibility, Hyperbolic

F64 = torch.float64
QUICK = Run(Settings(quick=True))


# ---- checks and rows ---------------------------------------------------------------------------


def test_checks_take_the_worst_of_all_values():
    values = [1.0, torch.tensor([3.0, 2.0]), [0.5]]
    assert at_most("", values, 3.0).passed and not below("", values, 3.0).passed
    assert at_least("", values, 0.5).passed and not above("", values, 0.5).passed
    assert at_most("", 2, 2.0).measured == 2.0
    for check in (at_most, at_least, below, above):
        assert not check("", [0.0, math.nan], 0.0).passed


def test_rows_are_chosen_and_shown():
    rows = Rows(
        Row(learner=name, shape=shape, share=i + 1.0, _hidden=object(), other=object())
        for i, (name, shape) in enumerate((n, s) for s in ((2, 3), (4, 4)) for n in ("A", "B"))
    )
    assert rows.where(learner="A").column("share") == [1.0, 3.0]
    assert rows.where(lambda r: r.share > 1, learner="A").one().shape == (4, 4)
    with pytest.raises(ValueError):
        rows.one(learner="A")
    grid_of = rows[:3] and Rows(rows[:3]).grid("", "shape", "learner", "share")
    assert grid_of.columns == ("shape", "A", "B")
    assert grid_of.rows == (("2×3", 1.0, 2.0), ("4×4", 3.0, ""))
    listed = rows.listing("", {"who": "learner", "double": lambda r: torch.tensor(2 * r.share)})
    assert listed.columns == ("who", "double") and listed.rows[1] == ("B", 4.0)
    assert rows[0].record() == {"learner": "A", "shape": [2, 3], "share": 1.0}


def test_a_run_measures_each_case_and_keeps_the_rows():
    run = Run(Settings(quick=True, seeds=3, first_seed=5))
    points = engine.cases(kind=("a", "b"), size=(2, 3))
    rows = run.each(points, lambda size: {"double": torch.tensor([2.0 * size])})
    assert [(r.kind, r.double.item()) for r in rows] == [("a", 4), ("a", 6), ("b", 4), ("b", 6)]
    assert run.records[0] == {"kind": "a", "size": 2, "double": [4.0]}
    assert (run.pick((10, 1)), run.seeds((9, 2)), run.seed) == (1, range(5, 8), 5)


def test_a_claim_sorts_what_it_yields():
    def measure(run):
        rows = run.each([{"x": 1}], lambda x: {"y": x})
        yield "a note"
        yield at_most("a check", rows.column("y"), 1)
        yield rows.listing("a table", {"x": "x"})

    claim = Claim("toy", "", "", "", "", measure, (2, 1))
    result = claim.run(Settings())
    assert result.passed and result.notes == ("a note",) and result.tables[0].rows == ((1,),)
    assert result.records == ({"x": 1, "y": 1},)


def test_a_result_passes_when_all_checks_do():
    good, bad = Check("", 1, "<", 2), Check("", 3, "<", 2)
    assert Result((good, good)).passed
    assert not Result((good, bad)).passed
    assert not Result(()).passed


def test_every_claim_is_filed_under_its_id():
    for name, claim in CLAIMS.items():
        assert claim.id == name
        words = (claim.title, claim.statement, claim.place, claim.tolerance)
        assert all(words) and min(claim.seconds) > 0


# ---- games -------------------------------------------------------------------------------------


def test_an_exponent_is_that_of_the_last_decade():
    rounds = tuple(range(1, 201))
    t = torch.arange(1, 201, dtype=F64)
    early = torch.where(t < 20, 100.0, 3 * t**0.7)
    assert grid.exponent(rounds, early) == pytest.approx(0.7, abs=1e-12)
    assert math.isnan(grid.exponent(rounds, -t))


def test_a_game_that_begins_with_nothing_is_judged_by_what_follows():
    gradients = torch.tensor([0.0, 1.0, -1.0], dtype=F64).reshape(3, 1, 1).expand(3, 1, 2)
    learner, stream = AdaGradOGD((1, 2), dtype=F64), streams.replay(gradients)
    (game,) = grid.play_all(QUICK, [grid.Match({"name": "x"}, learner, stream, 3)])
    trace = game.trace
    assert (trace.regret[0], trace.bound[0]) == (0, 0)
    assert game.ratio == (trace.regret / trace.bound)[1:].max()
    lost = dataclasses.replace(trace, regret=trace.regret * math.nan)
    assert math.isnan(grid.Game(trace=lost).ratio)


def test_a_grid_plays_what_it_keeps():
    watched = {"rounds_seen": lambda learner: torch.tensor([learner.rounds])}
    games = grid.Grid(
        learners={"FAML": FAML, "FTRL": FTRL},
        streams={"gaussian": grid.NINE["gaussian"]},
        shapes=[(2, 3)],
        rounds=(9, 3),
        games=(5, 4),
        game={"gradient_bound": 0.5},
        variants=[{"factor": 1.0}, {"factor": 2.0}],
        keep=lambda case: case.learner == "FAML" or case.factor == 2.0,
        watch=watched,
    )
    played = grid.play(QUICK, games)
    assert [(g.learner, g.factor) for g in played] == [("FAML", 1), ("FAML", 2), ("FTRL", 2)]
    assert played[0].trace.shape == (4, 2, 3) and played[0].rounds_seen[-1] == 3
    assert played[1].learned.eta == 2 * played[0].learned.eta
    by_hand = FAML((4, 2, 3), gradient_bound=0.5, dtype=F64)
    stream = streams.gaussian((4, 2, 3), bound=0.5, seed=0, dtype=F64)
    total = sum(stream.gradient(t) for t in (1, 2, 3))
    for t in (1, 2, 3):
        by_hand.play()
        by_hand.observe(stream.gradient(t))
    assert torch.equal(played[0].learned.total, total)
    assert torch.equal(played[0].bound, by_hand.bound())


# ---- the lower side ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FAML, FTRL])
def test_the_swing_costs_a_share_of_the_bound(make):
    swing, kept = grid.lower_side(QUICK, make.__name__, make, (2, 3), 0.5)
    assert swing.passed and swing.threshold == grid.LEAST[make.__name__]
    assert kept.passed


def test_worst_streams_are_replayed(monkeypatch):
    cases = grid.worst_streams(QUICK, "faml")
    assert {case.shape for case in cases} == {(1, 1), (2, 2), (2, 4)}
    assert {case.rounds for case in cases} == {10, 30}
    full = Run(Settings())
    assert max(case.rounds for case in grid.worst_streams(full, "faml")) == 300
    assert grid.replayed(QUICK, cases[0])[1] <= 1
    altered = dataclasses.replace(cases[0], ratio=cases[0].ratio + 2e-4)
    assert grid.replayed(QUICK, altered)[1] == pytest.approx(2, rel=1e-6)
    monkeypatch.setattr(streams, "worst_cases", lambda: [altered])
    _, replayed = grid.lower_side(QUICK, "FAML", FAML, (1, 1))
    assert not replayed.passed


def test_the_swing_alternates_and_then_pushes():
    signs = grid.swing(100, 2.0)
    assert signs[:80].sum() == 0 and (signs[80:] == -1).all()


# ---- numbers of single claims ------------------------------------------------------------------


def test_random_signs_cost_the_mean_of_a_random_walk():
    """E|Σ±1| of T steps is T·C(T−1, T/2−1)/2^{T−1}·…: here from its exact law by NumPy."""
    rounds = thm_gbpa.SIGN_ROUNDS
    law = np.array([math.comb(rounds, k) for k in range(rounds + 1)], dtype=float) / 2.0**rounds
    exact = math.sqrt(thm_gbpa.SIGN_SIDE / rounds) * (
        law @ np.abs(2 * np.arange(rounds + 1) - rounds)
    )
    found = thm_gbpa.random_signs(0)
    assert found.low <= exact <= found.high  # three standard errors; the seed is fixed
    assert exact > 2


def test_random_signs_by_hand():
    """1×1: E|Σε_t| = T·C(T−1, ⌊(T−1)/2⌋)/2^(T−1), over FAML's 2√(1+T)."""
    share, *_ = tightness.random_signs(Run(Settings()), "FAML", (1, 1), 10)
    exact = 10 * math.comb(9, 4) / 2**9 / (2 * math.sqrt(11))
    error = math.sqrt(10 - (10 * math.comb(9, 4) / 2**9) ** 2) / math.sqrt(tightness.SIGNS[0])
    assert share == pytest.approx(exact, abs=4 * error / (2 * math.sqrt(11)))


def test_without_the_projection_the_regret_is_the_sum_by_hand():
    """E = [I 0]: x_{t+1} = x_t ∓ η/√t, whose loss is m·η(√2 − 4/3)T^{3/2} to leading order."""
    horizons = (16, 256)
    learner = Shampoo((2, 2, 3), projection="none", radius=2.0, dtype=F64)
    (played,) = grid.play_all(QUICK, [tab_shampoo.turn(learner, horizons)])
    eta = 2 * math.sqrt(2)
    for horizon, regret in zip(horizons, played.regret.tolist(), strict=True):
        signs = np.where(np.arange(horizon) < horizon // 2, 1.0, -1.0)
        steps = eta * signs / np.sqrt(np.arange(1, horizon + 1))
        x = -np.concatenate([[0.0], np.cumsum(steps)[:-1]])
        assert regret == pytest.approx(2 * (signs @ x), rel=1e-9)
    leading = 2 * eta * (math.sqrt(2) - 4 / 3) * 256**1.5
    # Between sum and integral lies half a step a round, η√T of 0.081·ηT^{3/2}: 12.4/T of it.
    assert played.regret[1].item() == pytest.approx(leading, rel=12.4 / 256)


def test_padding_leads_to_the_augmented_leader():
    """The mean action at one width against NumPy's own draws, within five standard errors."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(4, 4, dtype=F64, generator=generator).numpy()
    gram = np.eye(4) + s @ s.T
    values, vectors = np.linalg.eigh(s @ s.T + gram)
    exact = (vectors / np.sqrt(values)) @ vectors.T @ s
    width, draws = 32, 4000
    alpha, beta = 2 + math.sqrt(width), 1 / math.sqrt(width - 5)
    root = np.linalg.cholesky(gram * beta / alpha)
    z = np.random.default_rng(0).standard_normal((draws, 4, width))
    u, _, vt = np.linalg.svd(np.pad(s, ((0, 0), (0, width - 4))) + root @ z, full_matrices=False)
    sampled = (u @ vt)[..., :4]
    distance = np.linalg.norm(sampled.mean(0) - exact, 2)
    error = np.linalg.norm(sampled.std(0)) / math.sqrt(draws)
    found = thm_ftpl.padded_distances(QUICK, width)["distance"]
    ours = math.sqrt(draws / max(64, 8 * thm_ftpl.WIDTH_SAMPLES[1] // width))
    assert abs(found - distance) <= 5 * error * (1 + ours)


def test_the_trade_off_has_closed_forms():
    exact = {
        "Hyperbolic": (math.sqrt(0.5), lambda c: np.sqrt(1 + c**2)),
        "Regularized": (1.0, lambda c: np.where(c <= 1, 1.0, (c + 1 / c) / 2)),
    }
    for name, (middle, value) in exact.items():
        curve = prop_admissibility.trade_off(name, prop_admissibility.POTENTIALS[name], 5)
        values = value(middle * np.array(prop_admissibility.SCALES))
        assert curve.values.numpy() == pytest.approx(values, rel=1e-6)
        assert (curve.upper.numpy() >= (1 - 1e-12) * values).all()
        least = math.sqrt(2 * curve.stated.alpha * curve.stated.beta)
        assert curve.upper.min().item() == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "beta", "missed"),
    [
        (0.9, 1.0, "α: lower end/stated − 1"),
        (1.0, 0.9, "β: lower end/stated − 1"),
        (0.4, 1.0, "smallest αβ stated"),
        (1.2, 1.0, "Regularized, Hyperbolic: smallest α found/stated"),
    ],
)
def test_wrong_constants_are_noticed(alpha, beta, missed, monkeypatch):
    monkeypatch.setattr(Hyperbolic, "admissibility", lambda self, m, n: Admissibility(alpha, beta))
    search = search_admissibility(Hyperbolic(), 2, 5, starts=4, steps=60)
    rows = Rows([Row(potential="Hyperbolic", shape=(2, 5), search=search)])
    checks = prop_admissibility.constants_checks(rows)
    assert missed in {check.name for check in checks if not check.passed}


def test_an_item_of_another_kind_is_refused():
    claim = Claim("odd", *["x"] * 4, lambda run: iter([iter([])]), (0, 0))
    with pytest.raises(TypeError, match="yield from"):
        claim.run(Settings())
