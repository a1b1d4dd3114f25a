"""The claims on lemmas and remarks: the quick ones hold, and a wrong constant fails them."""

import functools

import pytest
import torch

from nucleon.claims import CLAIMS, Settings, Silent
from nucleon.claims import played as games
from nucleon.claims.games import high_probability, lemma_discounting, remark_unknown_bound
from nucleon.claims.inequalities import lemmas_shampoo, lemmas_wishart, prop_tradeoff
from nucleon.claims.oracle import mixtures
from nucleon.online import theory
from nucleon.online.learners import FTPL, GBPA, AdaGradFTRL
from nucleon.online.theory import Sides

F64 = torch.float64
MODULES = {
    "lemmas-shampoo": lemmas_shampoo,
    "lemmas-wishart": lemmas_wishart,
    "lemma-discounting": lemma_discounting,
    "remark-unknown-bound": remark_unknown_bound,
    "prop-tradeoff": prop_tradeoff,
    "high-probability": high_probability,
}


class Counter:
    def begin(self, total, unit):
        self.total, self.done = total, 0

    def advance(self, amount, stage):
        self.done += amount


def shorten(patch):
    """The same checks on less."""
    patch.setattr(lemmas_shampoo, "SHAPES", ((1, 1), (2, 3)))
    patch.setattr(lemmas_wishart, "HESSIAN_SHAPES", ((1, 1), (2, 3)))
    patch.setattr(lemmas_wishart, "QUICK_SAMPLES", 8000)
    patch.setattr(remark_unknown_bound, "QUICK_LENGTHS", (30,))
    patch.setattr(remark_unknown_bound, "QUICK_GAMES", 8)
    patch.setattr(prop_tradeoff, "QUICK_MIXTURES", 1)
    patch.setattr(prop_tradeoff, "QUICK_SEARCH", {"starts": 3, "steps": 25, "replicates": 8})
    patch.setattr(high_probability, "QUICK_ADAPTIVE_ROUNDS", 150)
    patch.setattr(high_probability, "QUICK_ROUNDS", 30)


def shorten_more(patch):
    """Everything is played, some of it too shortly to pass."""
    shorten(patch)
    patch.setattr(lemmas_wishart, "QUICK_SAMPLES", 800)
    patch.setattr(remark_unknown_bound, "QUICK_ROUNDS", 10)
    short = functools.partial(games.swung, rounds=games.SWING_ROUNDS // 10)
    patch.setattr(remark_unknown_bound, "swung", short)
    patch.setattr(prop_tradeoff, "QUICK_SEARCH", {"starts": 2, "steps": 4, "replicates": 8})
    patch.setattr(high_probability, "QUICK_ADAPTIVE_ROUNDS", 15)
    patch.setattr(high_probability, "QUICK_ROUNDS", 6)


@functools.cache
def brief(name):
    with pytest.MonkeyPatch.context() as patch:
        shorten_more(patch)
        return CLAIMS[name].run(Settings(quick=True), Silent())


@pytest.mark.parametrize("name", MODULES)
def test_the_quick_claim_holds(name, monkeypatch):
    shorten(monkeypatch)
    counter = Counter()
    result = CLAIMS[name].run(Settings(quick=True), counter)
    assert result.passed, [c for c in result.checks if not c.passed]
    assert counter.done == counter.total
    assert result.tables and result.figures and result.records and result.notes
    for table in result.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize("name", MODULES)
def test_a_run_is_determined_by_its_settings(name, monkeypatch):
    one = brief(name)
    shorten_more(monkeypatch)
    two = CLAIMS[name].run(Settings(quick=True), Silent())
    assert (one.checks, one.records) == (two.checks, two.records)


# ---- a wrong constant fails ---------------------------------------------------------------------


def scaled_right(name, factor):
    """The library's right side times a factor."""

    def fault(patch):
        exact = getattr(theory, name)

        def wrong(*arguments, **options):
            left, right = exact(*arguments, **options)
            return Sides(left, factor * right)

        patch.setattr(theory, name, wrong)

    return fault


def scaled(name, factor):
    def fault(patch):
        exact = getattr(theory, name)
        patch.setattr(theory, name, lambda *a, **k: factor * exact(*a, **k))

    return fault


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


RIGHT = ("matrix_potential", "shampoo_gradient_term", "shampoo_distance_term")
FAULTS = {
    **{f"{n} × {f}": ("lemmas-shampoo", scaled_right(n, f)) for n in RIGHT for f in (0.9, 1.1)},
    "mirror_descent_regret × 0.9": ("lemmas-shampoo", scaled_right("mirror_descent_regret", 0.9)),
    "mirror_descent_regret × 1.1": ("lemmas-shampoo", scaled_right("mirror_descent_regret", 1.1)),
    "nuclear_hessian × 0.9": ("lemmas-wishart", scaled_right("nuclear_hessian", 0.9)),
    "nuclear_hessian × 1.1": ("lemmas-wishart", scaled_right("nuclear_hessian", 1.1)),
    "inverse_chi_square × 0.9": ("lemmas-wishart", scaled_right("inverse_chi_square", 0.9)),
    "inverse_chi_square × 1.1": ("lemmas-wishart", scaled_right("inverse_chi_square", 1.1)),
    "inverse_wishart 1/(n−m)": ("lemmas-wishart", width_off_by_one),
    "loss_decomposition": ("lemma-discounting", without_the_second_sum),
    "scale-free × 0.9": ("remark-unknown-bound", scaled("scale_free_adagrad_bound", 0.9)),
    "adagrad_bound × 1.1": ("remark-unknown-bound", scaled("adagrad_bound", 1.1)),
    "clipping without clipping": ("remark-unknown-bound", unclipped),
    "no excess": ("remark-unknown-bound", without_an_excess),
    "no deviation": ("high-probability", without_a_deviation),
    "admissibility_tradeoff × 0.9": ("prop-tradeoff", scaled_right("admissibility_tradeoff", 0.9)),
    "oblivious deviation × ½": ("high-probability", scaled("ftpl_oblivious_deviation", 0.5)),
    "oblivious deviation × 2": ("high-probability", scaled("ftpl_oblivious_deviation", 2.0)),
    "adaptive deviation × ½": ("high-probability", scaled("ftpl_adaptive_deviation", 0.5)),
}


def checks(result, *, passed):
    return {check.name for check in result.checks if check.passed is passed}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_constant_fails_the_claim(fault, monkeypatch):
    """It fails a check that passes without it."""
    name, put_in = FAULTS[fault]
    right = brief(name)
    shorten_more(monkeypatch)
    put_in(monkeypatch)
    wrong = CLAIMS[name].run(Settings(quick=True), Silent())
    assert checks(wrong, passed=False) & checks(right, passed=True)


def test_half_is_the_least_product():
    """At αβ < ½ the proof's inequality puts the ceiling below the nuclear norm."""
    x = torch.randn(2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    root = torch.from_numpy(mixtures.best_root(x.numpy(), (0.49, 1.0)))
    left, right = theory.admissibility_tradeoff(x, root, alpha=0.49, beta=1.0)
    assert right < left


def test_all_are_registered():
    assert set(MODULES) < set(CLAIMS)
    assert sum(CLAIMS[n].seconds for n in (*MODULES, "tightness")) <= 360
