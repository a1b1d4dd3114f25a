"""No certificate outside its theorem: each way to one that a person could find, and a search."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import LEARNERS, ledger_of, nuclear, operator
from nucleon.certificate import Certificate
from nucleon.online import learners, streams, theory
from nucleon.online.game import Trace, play
from nucleon.online.learners import (
    FAML,
    FTL,
    FTPL,
    FTRL,
    GBPA,
    AdaGradFTRL,
    AdaGradOGD,
    GaussianFTPL,
    KroneckerFTRL,
    OneSidedShampoo,
    ScalarGBPA,
)
from nucleon.online.potentials import (
    Admissibility,
    Gaussian,
    Hyperbolic,
    Nuclear,
    Potential,
    Regularized,
)
from nucleon.online.regret import Ledger

F64 = torch.float64
SHAPE = (2, 3)


def gaussian(shape=SHAPE, **options):
    return streams.gaussian(shape, dtype=F64, **options)


def played(learner, rounds=8, **options):
    """A learner's certificate after a game against fixed gradients."""
    play(learner, gaussian(learner.shape), rounds)
    return learner.certificate(**options)


# ---- options edited after the fact -------------------------------------------------------------

EDITS = [
    (FAML, "radius", 2.0),
    (FAML, "eta", 3.0),
    (FAML, "stated_bound", torch.tensor(9.0, dtype=F64)),
    (FAML, "on_excess", "grow"),
    (FAML, "potential", Nuclear()),
    (FAML, "constants", Admissibility(5.0, 5.0)),
    (FTRL, "potential", Regularized(tolerance=0.1)),
    (FTPL, "redraw", False),
    (FTPL, "stream", 4),
    (KroneckerFTRL, "gradient_bound", 50.0),
    (KroneckerFTRL, "eta", 50.0),
    (ScalarGBPA, "gradient_bound", 50.0),
    (OneSidedShampoo, "epsilon", 50.0),
]


@pytest.mark.parametrize(("kind", "name", "value"), EDITS, ids=lambda v: getattr(v, "name", str(v)))
@pytest.mark.parametrize("when", ["after", "for an action", "for a gradient"])
def test_an_option_edited_during_or_after_a_game_ends_its_certificate(kind, name, value, when):
    learner = kind(SHAPE, dtype=F64)
    ledger, stated = learner.ledger(), getattr(learner, name)
    for t in range(1, 6):
        if when == "for an action" and t == 3:
            setattr(learner, name, value)
        action, gradient = learner.play(), 0.3 * gaussian().gradient(t)
        setattr(learner, name, value if when == "for a gradient" and t == 3 else stated)
        learner.observe(gradient, oblivious=True)
        setattr(learner, name, stated)
        ledger.record(gradient, action)
    assert learner.certificate(ledger).holds == (when == "after")
    if when == "after":
        setattr(learner, name, value)
        ledger.radius = learner.radius
    certificate = learner.certificate(None if name == "radius" else ledger)
    assert not certificate.holds and "changed during the game" in certificate.refusal


@pytest.mark.parametrize("back", [True, False])
def test_a_change_is_not_forgotten_by_a_saved_state(back):
    learner = FAML(SHAPE, dtype=F64)
    play(learner, gaussian(), 3)
    learner.eta = 7.0
    if back:
        learner.play()
        learner.eta = 1.0
    resumed = FAML(SHAPE, eta=learner.eta, dtype=F64)
    resumed.load_state_dict(learner.state_dict())
    assert "eta changed" in resumed.certificate().refusal


def test_trust_is_not_forgotten_when_checks_are_switched_on():
    learner = FAML((1, 1), gradient_bound=0.1, validate=False, dtype=F64)
    for value in (1.0, -1.0, 1.0):
        learner.play()
        learner.observe(torch.full((1, 1), value, dtype=F64))
    learner.validate = True
    learner.play()
    learner.observe(torch.full((1, 1), 0.05, dtype=F64))
    resumed = FAML((1, 1), gradient_bound=0.1, dtype=F64)
    resumed.load_state_dict(learner.state_dict())
    for one in (learner, resumed):
        assert any("validate=False" in c for c in one.certificate().conditional_on)


def edited(learner, name, change):
    setattr(learner, name, change(getattr(learner, name)))


STATES = [
    (FAML, "level"),
    (FAML, "gram"),
    (FAML, "excess"),
    (FAML, "first_nuclear"),
    (lambda *a, **k: FAML(*a, gradient_bound=None, **k), "level"),
    (FTRL, "gaps"),
    (FTRL, "level"),
    (lambda *a, **k: FTPL(*a, **k), "nuclear_square"),
    (lambda _, **k: GaussianFTPL((1, 3), **k), "level"),
    (KroneckerFTRL, "column_gram"),
    (ScalarGBPA, "square_sum"),
    (OneSidedShampoo, "gram"),
    (lambda _, **k: AdaGradOGD((1, 3), **k), "moment"),
]


@pytest.mark.parametrize("how", ["replaced", "written to", "assigned as it was"])
@pytest.mark.parametrize("when", ["after", "during"])
@pytest.mark.parametrize(("make", "name"), STATES)
def test_a_state_edited_from_outside_ends_the_certificate(make, name, when, how):
    change = {
        "replaced": lambda x: 3 * x,
        "written to": lambda x: x.mul_(3),
        "assigned as it was": lambda x: x,
    }[how]
    learner = make(SHAPE, dtype=F64)
    for t in range(1, 6):
        if when == "during" and t == 4:
            edited(learner, name, change)
        learner.play()
        learner.observe(0.3 * gaussian(learner.shape).gradient(t), oblivious=True)
    if when == "after":
        assert learner.certificate().holds
        edited(learner, name, change)
    certificate = learner.certificate()
    assert certificate.holds == (how == "assigned as it was")
    if how != "assigned as it was":
        assert name in learner.changed and "changed during the game" in certificate.refusal
        copied = copy.deepcopy(learner)
        assert copied.certificate().refusal == certificate.refusal


def test_copies_and_pickles_play_on_with_their_certificate():
    learner = FTRL(SHAPE, dtype=F64)
    play(learner, gaussian(), 3)
    for other in (copy.deepcopy(learner), copy.copy(learner), pickle.loads(pickle.dumps(learner))):
        other.play()
        other.observe(gaussian().gradient(4), oblivious=True)
        assert other.rounds == 4 and other.certificate().holds
        edited(other, "gram", lambda x: 3 * x)
        assert "gram changed" in copy.deepcopy(other).certificate().refusal
    assert learner.rounds == 3 and learner.certificate().holds


def test_inference_mode_keeps_the_certificate():
    learner = FTRL(SHAPE, dtype=F64)
    with torch.inference_mode():
        assert played(learner).holds
        learner.gram = 3 * learner.gram
        assert "gram changed" in learner.certificate().refusal


def test_the_sides_of_the_game_are_those_of_its_shape():
    learner = ScalarGBPA(SHAPE, dtype=F64)
    with pytest.raises(AttributeError):
        learner.short = 3
    played(learner)
    learner.shape = (3, 3)
    assert "shape changed" in learner.certificate().refusal


@pytest.mark.parametrize("touch", ["norm", "certificate", "state"])
def test_an_option_edited_before_the_game_is_the_game_s(touch):
    learner = FAML(SHAPE, dtype=F64)
    if touch == "norm":
        learner.norm(torch.zeros(SHAPE, dtype=F64))
    if touch == "certificate":
        learner.certificate()
    if touch == "state":
        learner.state_dict()
    learner.radius = 0.3
    expected = played(FAML(SHAPE, radius=0.3, dtype=F64))
    certificate = played(learner)
    assert certificate.holds and certificate.regret == expected.regret
    assert certificate.bound == expected.bound


# ---- another way to play -----------------------------------------------------------------------


def zero(self, *_):
    return torch.zeros(self.shape, dtype=self.dtype)


def without(base, **methods):
    """A subclass of `base` with other methods, and nothing said of them."""
    return type("Other", (base,), methods)


OTHERS = [
    without(FAML, _act=zero),
    without(FAML, _direction=zero),
    without(FAML, smoothing=lambda self: 4 * FAML.smoothing(self)),
    without(FAML, _absorb=lambda self, g: FAML._absorb(self, g / 2)),
    without(FAML, bound=lambda self: 100 * FAML.bound(self)),
    without(FTRL, _direction=zero),
    without(FTPL, _act=zero),
    without(FTPL, is_random=property(lambda self: False)),
    without(FTPL, samples_drawn=property(lambda self: 10**6)),
    without(FTPL, _deviation=lambda self, oblivious, delta: 0.0),
    without(FTPL, _refusal=lambda self, oblivious, delta: None),
    without(FAML, _conditions=lambda self: ()),
    without(ScalarGBPA, _act=zero),
    without(KroneckerFTRL, _minimize=lambda self, *a: (self.center, self.gaps)),
    without(OneSidedShampoo, _act=zero),
    without(without(FAML, _act=zero)),
    type("Mixed", (type("Mixin", (), {"_act": zero}), FAML), {}),
]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda k: k.__mro__[1].__name__)
def test_another_way_to_play_does_not_inherit_the_theorem(kind):
    learner = kind(SHAPE, dtype=F64)
    certificate = played(learner)
    assert not certificate.holds and certificate.theorem == "none"
    assert f"{kind.__name__} names no theorem" in certificate.refusal


def test_a_class_may_name_a_theorem_of_its_own_or_change_nothing():
    own = without(FAML, _act=FAML._act, theorem="a theorem of its own")
    for kind, theorem in ((own, "a theorem of its own"), (without(FAML), FAML.theorem)):
        certificate = played(kind(SHAPE, dtype=F64))
        assert certificate.holds and certificate.theorem == theorem
    for learner in learners.LEARNERS.values():
        assert (learner.theorem == "none") == (learner is FTL)


def test_another_gradient_does_not_inherit_what_a_potential_promises():
    class Shorter(Hyperbolic):
        def gradient(self, s, smoothing):
            return super().gradient(s, smoothing) / 2

    (condition,) = played(GBPA(SHAPE, Shorter(), dtype=F64)).conditional_on
    assert condition.startswith("Shorter is admissible with the constants that it states")
    assert played(GBPA(SHAPE, Hyperbolic(), dtype=F64)).conditional_on == ()


# ---- adaptive rounds ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FTPL, lambda *a, **k: GaussianFTPL(*a, samples=1, **k)])
@pytest.mark.parametrize("save", [False, True])
def test_adaptive_rounds_are_not_forgotten(make, save):
    shape = (1, 4)
    learner = make(shape, dtype=F64)
    ledger = learner.ledger()
    play(learner, streams.adversary(shape, dtype=F64), 20, ledger=ledger)
    if save:
        state, learner = learner.state_dict(), make(shape, dtype=F64)
        learner.load_state_dict(state)
    trace = play(learner, gaussian(shape), 20, ledger=ledger)
    assert not trace.oblivious and not trace.certificate.holds
    assert "fixed before" in trace.refusal
    assert not learner.certificate(ledger, oblivious=True).holds


def test_rounds_that_nobody_vouched_for_are_not_oblivious():
    learner = FTPL(SHAPE, dtype=F64)
    ledger = ledger_of(learner, gaussian(), 5)  # by hand, with no word on the gradients
    trace = play(learner, gaussian(), 5, ledger=ledger)
    assert not trace.certificate.holds and not learner.certificate().holds
    assert learner.certificate(oblivious=True).holds  # the caller's own word


def test_an_oblivious_stream_does_not_see_the_actions():
    class Lying:
        name, shape, gradient_bound, oblivious, rounds = "lying", SHAPE, 1.0, True, None

        def gradient(self, t, action=None):
            return action / operator(action)

    with pytest.raises(AttributeError, match="NoneType"):
        play(FTPL(SHAPE, dtype=F64), Lying(), 3)


# ---- bounds that are none ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bound_that_is_no_number_does_not_hold(bad):
    zero, bound = torch.zeros(2, dtype=F64), torch.tensor([1.0, bad], dtype=F64)
    assert not Certificate(zero, bound, "Theorem 3.2").holds
    assert not Certificate(-bound, torch.ones(2, dtype=F64), "Theorem 3.2").holds
    assert Certificate(zero, torch.ones(2, dtype=F64), "Theorem 3.2").holds
    with pytest.raises(ValueError, match="one entry per game"):
        Certificate(zero, torch.ones((), dtype=F64), "Theorem 3.2")


def test_a_learner_without_a_bound_is_refused_in_words():
    class Unbounded(learners.Learner):
        name, theorem, state_names = "unbounded", "a conjecture", ()

        def bound(self):
            return torch.full(self.shape[:-2], torch.inf, dtype=F64)

        def _act(self):
            return torch.zeros(self.shape, dtype=self.dtype)

        def _absorb(self, gradient):
            pass

    with pytest.raises(TypeError, match=r"Unbounded .* option_names"):
        Unbounded(SHAPE)
    Unbounded.option_names = ()
    certificate = played(Unbounded(SHAPE, dtype=F64))
    assert not certificate.holds and "finite bound" in certificate.refusal
    assert "no constants" in played(GBPA(SHAPE, Nuclear(), dtype=F64)).refusal


# ---- actions outside the ball ------------------------------------------------------------------


class Stretched(Potential):
    """Hyperbolic smoothing times a factor: nothing keeps its gradient in the ball."""

    def __init__(self, factor):
        self.factor = factor

    def value(self, s, smoothing):
        return self.factor * Hyperbolic().value(s, smoothing)

    def gradient(self, s, smoothing):
        return self.factor * Hyperbolic().gradient(s, smoothing)

    def admissibility(self, m, n):
        return Admissibility(50.0, 50.0)  # a bound that any regret is below


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), SHAPE, (3, 2), (2, 2, 3)], ids=str)
def test_actions_outside_the_ball_are_not_certified(shape, dtype):
    norms = {}
    for factor in (1.0, 4.3):
        learner = GBPA(shape, Stretched(factor), eta=1e3, radius=0.5, dtype=dtype)
        trace = play(learner, streams.alternating(shape, dtype=dtype), 6, record=1)
        norms[factor] = trace.norm.max().item()
        certificate = learner.certificate()
        assert certificate.holds == (factor == 1.0) == trace.certificate.holds
        assert (certificate.regret <= certificate.bound).all()
    assert norms[1.0] <= 0.5 < 2 < norms[4.3]
    assert f"norm {norms[4.3]:.6g}, outside the ball of radius 0.5" in certificate.refusal


@pytest.mark.parametrize("excess", [2e-9, 1e-6, 1e-3])
def test_a_norm_above_the_radius_by_more_than_rounding_is_noticed(excess):
    rng = np.random.default_rng(3)
    for shape in [(4, 6), (6, 4), (1, 5), (3, 4, 4)]:
        x = torch.from_numpy(rng.standard_normal(shape))
        x = x / torch.linalg.matrix_norm(x, ord=2, keepdim=True).amax()
        for radius in (1e-200, 1.0, 1e200):
            for factor, noticed in ((1 + excess, True), (1 + 1e-12, False)):
                ledger = Ledger(shape, radius=radius)
                ledger.record(torch.zeros(shape, dtype=F64), radius * factor * x)
                assert bool((ledger.outside > 0).any()) == noticed
    one = torch.eye(2, dtype=F64)
    for ledger, leaves in ((Ledger((2, 2)), False), (learners.BoxLedger((2, 2)), False)):
        ledger.record(one, one)
        assert bool(ledger.outside.any()) == leaves
        ledger.record(one, (1 + excess) * one)
        assert ledger.outside.item() == pytest.approx(1 + excess, rel=1e-12)


def test_a_step_out_of_the_ball_is_not_forgotten():
    learner = GBPA(SHAPE, Stretched(4.3), eta=1e3, dtype=F64)
    play(learner, gaussian(), 4)
    resumed = GBPA(SHAPE, Stretched(4.3), eta=1e3, dtype=F64)
    resumed.load_state_dict(learner.state_dict())
    zero = torch.zeros(SHAPE, dtype=F64)
    for _ in range(20):
        resumed.play()
        resumed.observe(zero)
    assert "outside the ball" in resumed.certificate().refusal


# ---- another game's ledger ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LEARNERS, "adagrad", "box", "shampoo"])
def test_the_ledger_of_another_game_is_refused(name):
    makers = {
        "adagrad": lambda shape, **o: AdaGradOGD((1, 3), ball="l2", **o),
        "box": lambda shape, **o: AdaGradOGD((1, 3), **o),
        "shampoo": OneSidedShampoo,
    }
    make = {**LEARNERS, **makers}[name]

    def game(seed, rounds):
        learner = make(SHAPE, dtype=F64)
        ledger = learner.ledger()
        play(learner, gaussian(learner.shape, seed=seed), rounds, ledger=ledger)
        return learner, ledger

    for rounds in (1, 2, 20):  # in the first round both lose nothing
        learner, own = game(0, rounds)
        _, other = game(1, rounds)
        learner.certificate(own)
        with pytest.raises(ValueError, match="another game"):
            learner.certificate(other)
        with pytest.raises(ValueError, match="another game"):
            play(learner, gaussian(learner.shape), 1, ledger=other)


@pytest.mark.parametrize("tamper", ["loss", "total", "actions"])
def test_a_ledger_that_tells_another_story_is_refused(tamper):
    learner = FAML(SHAPE, dtype=F64)
    ledger = learner.ledger()
    for t in range(1, 30):
        action, gradient = learner.play(), gaussian().gradient(t)
        learner.observe(gradient)
        ledger.record(gradient, 0.999 * action if tamper == "actions" else action)
    if tamper != "actions":
        setattr(ledger, tamper, getattr(ledger, tamper) * (1 - 1e-6))
    with pytest.raises(ValueError, match="another game"):
        learner.certificate(ledger)


def test_the_regret_is_the_learner_s_own():
    class Lucky(Ledger):
        def regret(self):
            return super().regret() - 5

        def lower(self):
            return super().lower() - 5

    learner, ledger = FAML(SHAPE, dtype=F64), Lucky(SHAPE)
    play(learner, gaussian(), 8, ledger=ledger)
    told, own = learner.certificate(ledger), learner.certificate()
    assert told.regret == own.regret and told.lower == own.lower


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_rounding_in_a_ledger_is_forgiven(dtype):
    # As the symmetrized actions of the quasi-Newton problem are.
    learner = FAML((3, 3), dtype=dtype)
    ledger = learner.ledger()
    eps = torch.finfo(dtype).eps
    for t in range(1, 200):
        action = learner.play()
        gradient = streams.gaussian((3, 3), dtype=dtype).gradient(t)
        learner.observe(gradient)
        ledger.record(gradient, action * (1 + eps * (-1) ** t))
    assert learner.certificate(ledger).holds


# ---- gradients above the bound -----------------------------------------------------------------

BOUNDED = {
    "faml": lambda dtype: FAML((3, 4), dtype=dtype),
    "ftrl": lambda dtype: FTRL((3, 4), dtype=dtype),
    "kronecker": lambda dtype: KroneckerFTRL((3, 4), dtype=dtype),
    "scalar": lambda dtype: ScalarGBPA((3, 4), gradient_bound=math.sqrt(3), dtype=dtype),
    "adagrad": lambda dtype: AdaGradFTRL((1, 4), preconditioner="scalar", ball="l2", dtype=dtype),
    "gaussian": lambda dtype: GaussianFTPL((1, 4), dtype=dtype),
}


@pytest.mark.parametrize("above", [1e-4, 1e-3, 0.01, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("name", BOUNDED)
def test_a_gradient_above_the_bound_is_refused(name, dtype, above):
    learner = BOUNDED[name](dtype)
    gradient = torch.eye(*learner.shape, dtype=dtype)  # of norm exactly the bound
    for _ in range(3):
        learner.play()
        learner.observe(gradient)
    learner.play()
    with pytest.raises(ValueError, match="above"):
        learner.observe((1 + above) * gradient)
    assert learner.rounds == 3


@pytest.mark.parametrize("name", BOUNDED)
def test_what_rounding_leaves_above_the_bound_is_in_the_regret_bound(name):
    eps = torch.finfo(torch.float32).eps
    exact, rounded = BOUNDED[name](torch.float32), BOUNDED[name](torch.float32)
    gradient = torch.eye(*exact.shape)
    above = (1 + 4 * eps) * gradient
    for _ in range(5):
        for learner, g in ((exact, gradient), (rounded, above)):
            learner.play()
            learner.observe(g)
    sides = nuclear((above - gradient).double().numpy())
    rounds = 4 if name in ("faml", "ftrl", "gaussian") and exact.stated_bound is None else 5
    factor = 2 * rounds * exact.radius
    found = (rounded.bound() - exact.bound()).item()
    # The bound's own growth with the Gram matrix is at most (βη + α/η)·T·eps·Tr√… ≪ ten times this.
    assert found >= factor * sides * (1 - 1e-3)
    assert rounded.excess.item() > 0 == exact.excess.item()


# ---- high probability --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "k", "redraw"),
    [
        (lambda **o: FTPL((3, 5), samples=4, **o), 4, True),
        (lambda **o: FTPL((5, 3), samples=4, antithetic=True, **o), 2, True),
        (lambda **o: FTPL((3, 5), samples=4, redraw=False, **o), 4, False),
    ],
)
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_bound_of_one_draw_by_hand(make, k, redraw, discount):
    learner, delta, rounds = make(radius=2.0, discount=discount, dtype=F64), 0.01, 12
    source = gaussian(learner.shape)
    trace = play(learner, source, rounds, delta=delta)
    norms = np.array([nuclear(source.gradient(t).numpy()) for t in range(2, rounds + 1)])
    norms = norms * discount ** np.arange(rounds - 2, -1, -1)  # X_1 = 0 is no draw
    size = math.sqrt((norms**2).sum()) if redraw else norms.sum()
    added = 2.0 * math.sqrt(2 * math.log(1 / delta) / k) * size
    assert trace.bound[-1].item() == pytest.approx(learner.bound().item() + added, rel=1e-12)
    certificate = trace.certificate
    assert certificate.holds and certificate.conditional_on == ()
    assert "probability at least 0.99" in certificate.theorem and trace.delta == delta
    assert "mean" in learner.certificate().conditional_on[0]


def test_against_adaptive_gradients_it_says_so_or_refuses():
    shape, delta = (2, 4), 0.05
    learner = FTPL(shape, samples=64, dtype=F64)
    play(learner, streams.adversary(shape, dtype=F64), 30)
    assert "delta" in learner.certificate().refusal
    certificate = learner.certificate(delta=delta)
    assert certificate.refusal is None and certificate.holds
    assert "linear in T" in certificate.theorem
    assert "later rounds" in certificate.conditional_on[0]
    added = theory.ftpl_adaptive_deviation(
        learner.nuclear_sum[None], rows=2, columns=4, radius=1.0, samples=64, delta=delta, rounds=30
    )
    assert certificate.bound.item() == pytest.approx((learner.bound() + added).item(), rel=1e-12)
    fixed = FTPL(shape, redraw=False, dtype=F64)
    play(fixed, streams.adversary(shape, dtype=F64), 5)
    assert "one draw" in fixed.certificate(delta=delta).refusal


def test_games_of_a_batch_share_the_probability():
    learner = FTPL((3, 2, 4), samples=2, dtype=F64)
    play(learner, gaussian((3, 2, 4)), 10)
    alone = learner.nuclear_square.sqrt()[:, None]
    added = theory.ftpl_oblivious_deviation(alone, radius=1.0, samples=2, delta=0.1 / 3)
    torch.testing.assert_close(learner.certificate(delta=0.1).bound, learner.bound() + added)


def test_a_probability_too_small_to_share_is_named_as_given():
    learner = FTPL((3, 2, 4), dtype=F64)
    play(learner, gaussian((3, 2, 4)), 4)
    with pytest.raises(ValueError, match=r"delta=5e-324 shared by 3 games"):
        learner.certificate(delta=5e-324)
    assert FTPL((2, 4), dtype=F64).certificate(delta=5e-324).bound.isfinite()


class Sampled(Gaussian):
    """A random potential of one's own, which may keep its noise."""

    def gradient(self, s, smoothing):
        return super().gradient(s, smoothing)


def test_a_random_potential_is_taken_at_its_word_on_its_noise():
    for delta in (None, 0.1):
        learner = GBPA((2, 4), Sampled(4), dtype=F64)
        play(learner, gaussian((2, 4)), 6)
        conditions = learner.certificate(delta=delta).conditional_on
        assert any("noise of its own in each round" in c for c in conditions)
        assert not any("exact" in c for c in conditions)


def test_games_of_neighbouring_seeds_have_noise_of_their_own():
    def actions(seed):
        learner = GBPA((1, 1), Gaussian(1, seed), dtype=F64)
        for _ in range(300):
            yield learner.play().item()
            learner.observe(torch.zeros(1, 1, dtype=F64), oblivious=True)

    first, second = (np.array([*actions(seed)])[1:] for seed in (0, 1))
    assert first.std() > 0.1 and second.std() > 0.1
    for lag in range(-3, 4):
        pairs = np.roll(first, lag) * second
        assert abs(pairs.mean()) <= 4 * pairs.std() / math.sqrt(len(pairs))  # 1 chance in 15,000


def test_a_learner_without_noise_needs_no_probability():
    for make in (FAML, FTRL, lambda s, **o: GaussianFTPL((1, 3), **o)):
        learner = make(SHAPE, dtype=F64)
        play(learner, gaussian(learner.shape), 10)
        sure, probable = learner.certificate(), learner.certificate(delta=0.1)
        assert torch.equal(sure.bound, probable.bound) and sure.theorem == probable.theorem
    for bad in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="delta"):
            learner.certificate(delta=bad)


# ---- how tight ---------------------------------------------------------------------------------


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_a_certificate_says_how_tight_it_is(discount, tmp_path):
    learner = FAML((2, 3, 4), radius=2.0, discount=discount, dtype=F64)
    trace = play(learner, gaussian((2, 3, 4)), 25)
    certificate = trace.certificate
    torch.testing.assert_close(certificate.tightness, certificate.regret / certificate.bound)
    trace_of_gram = learner.gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(certificate.lower, 2.0 * (trace_of_gram / 2).sqrt())
    assert ((certificate.lower_share > 0) & (certificate.lower_share < 1)).all()
    worst = certificate.slack.argmin()
    assert f"({100 * certificate.tightness[worst].item():.3g}% of it)" in str(certificate)
    assert f"less than {certificate.lower[worst].item():.3g} for" in str(certificate)
    trace.save(tmp_path / "game.jsonl")
    assert torch.equal(Trace.load(tmp_path / "game.jsonl").certificate.lower, certificate.lower)


@pytest.mark.parametrize("make", [FAML, FTRL, FTL, OneSidedShampoo])
def test_some_signs_cost_every_learner_the_lower_bound(make):
    # All 2⁶ signs of six gradients: their mean regret is D·E‖Σε_tG_t‖_*, at least the lower bound.
    gradients = torch.stack([gaussian().gradient(t) for t in range(1, 7)])
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 6)
    learner = make((64, *SHAPE), dtype=F64)
    for t in range(6):
        learner.play()
        learner.observe(signs[:, t, None, None] * gradients[t])
    certificate = learner.certificate()
    expected = nuclear(torch.einsum("bt,tij->bij", signs, gradients).numpy()).mean()
    assert certificate.regret.mean().item() == pytest.approx(expected, rel=1e-6)
    assert certificate.regret.mean() >= certificate.lower[0]


# ---- and a search ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([*LEARNERS, "kronecker", "scalar", "one-sided"]),
    shape=st.sampled_from([(1, 1), (1, 3), (3, 1), (2, 3), (2, 2, 2)]),
    dtype=st.sampled_from([torch.float32, F64]),
    scale=st.sampled_from([1e-12, 1.0, 1e9]),
    radius=st.sampled_from([1e-3, 1.0, 1e5]),
    trick=st.sampled_from(["none", "eta", "radius", "adaptive", "unplayed", "ledger", "above"]),
    at=st.integers(0, 5),
    oblivious=st.sampled_from([None, True, False]),
    delta=st.sampled_from([None, 1e-3]),
    seed=st.integers(0, 99),
)
def test_no_trick_obtains_a_certificate(
    name, shape, dtype, scale, radius, trick, at, oblivious, delta, seed
):
    kinds = {"kronecker": KroneckerFTRL, "scalar": ScalarGBPA, "one-sided": OneSidedShampoo}
    bounded = name != "one-sided"
    options = {"gradient_bound": 2 * scale} if bounded else {}
    learner = {**LEARNERS, **kinds}[name](shape, radius=radius, dtype=dtype, **options)
    ledger, source = learner.ledger(), streams.gaussian(shape, bound=scale, dtype=dtype, seed=seed)
    for t in range(6):
        action = learner.play()
        gradient = source.gradient(t + 1)
        if t == at and trick == "above" and bounded:
            with pytest.raises(ValueError, match="above"):
                learner.observe(gradient * (2 * math.sqrt(2) * 1.01 * scale / operator(gradient)))
        if t == at and trick == "radius":
            learner.radius = 2 * radius
        learner.observe(gradient, oblivious=not (t == at and trick == "adaptive"))
        ledger.record(gradient, action)
        if t == at and trick == "unplayed":
            learner.observe(gradient, unplayed=True, oblivious=True)
        learner.radius = radius
    if trick == "eta" and bounded:
        learner.eta = 3 * learner.eta
    if trick == "ledger":
        ledger.loss = ledger.loss - 1e-3 * radius * scale
    words = {"oblivious": oblivious, "delta": delta}
    if trick == "ledger":
        with pytest.raises(ValueError, match="another game"):
            learner.certificate(ledger, **words)
        return
    certificate = learner.certificate(ledger, **words)
    broken = trick in ("radius", "unplayed") or (trick == "eta" and bounded)
    adaptive = name == "ftpl" and delta is None and (trick == "adaptive" or oblivious is False)
    assert (certificate.refusal is None) == (name != "ftl" and not broken and not adaptive)
    assert not certificate.holds or certificate.refusal is None
    if certificate.refusal is None and (name != "ftpl" or delta is not None):
        assert certificate.holds
