"""The contract of all learners: feasible, within the bound, as the oracle plays, resumable."""

import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from helpers import SHAPES, STREAMS, actions_of, ledger_of, rounds_of
from helpers_states import differences
from nucleon.claims import beside
from nucleon.claims.games import remark_unknown_bound
from nucleon.online import learners, streams
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
    Learner,
    OneSidedShampoo,
    ScalarGBPA,
    Shampoo,
)
from nucleon.online.potentials import Gaussian, Hyperbolic

F64 = torch.float64
VECTORS = ((1, 1), (1, 5), (5, 1), (2, 1, 4))


class Case(NamedTuple):
    """A learner with the options that it is played with, and what the contract says of it."""

    make: Callable[..., Learner]
    bound: Callable[[float, tuple[int, ...]], dict[str, float]]
    """Options that state the bound of gradients with ‖G_t‖_op ≤ bound."""
    options: Mapping[str, object] = MappingProxyType({})
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    random: bool = False
    solved: float = 1e-12
    """Return the largest distance of two actions that are solved from different starts."""

    def __call__(self, shape, *, bound=1.0, **options):
        stated = self.bound(bound, shape)
        return self.make(shape, **{"dtype": F64, **stated, **self.options, **options})


def operator(bound, shape):
    return {"gradient_bound": bound}


def frobenius(bound, shape):
    return {"gradient_bound": bound * math.sqrt(min(shape[-2:]))}


def delta(bound, shape):
    return {"delta": bound}


def unknown(bound, shape):
    return {}


def adagrad():
    """Every update, preconditioner and ball."""
    ways = {"ogd": (AdaGradOGD, unknown, {}), "stated": (AdaGradFTRL, delta, {"offset": "stated"})}
    for offset in ("clip", "scale-free", "proximal"):
        ways[offset] = (AdaGradFTRL, unknown, {"offset": offset})
    for way, (make, bound, fixed) in ways.items():
        for preconditioner in ("scalar", "diagonal", "full"):
            for ball in ("l2", "linf"):
                if (way, preconditioner) != ("scale-free", "full"):
                    own = {**fixed, "preconditioner": preconditioner, "ball": ball}
                    yield (
                        f"{way}-{preconditioner}-{ball}",
                        Case(make, bound, own, VECTORS, solved=1e-7),
                    )


ADAGRAD = dict(adagrad())
CASES = {
    "ftl": Case(FTL, operator),
    "ftrl": Case(FTRL, operator, solved=1e-3),
    "ftpl": Case(FTPL, operator, {"samples": 4}, random=True),
    "ftpl-fixed": Case(FTPL, operator, {"samples": 4, "redraw": False}, random=True),
    "faml": Case(FAML, operator),
    "faml-grow": Case(FAML, operator, {"gradient_bound": None}),
    "faml-clip": Case(FAML, operator, {"gradient_bound": None, "on_excess": "clip"}),
    "gbpa": Case(GBPA, operator, {"potential": Hyperbolic()}),
    "gbpa-random": Case(GBPA, operator, {"potential": Gaussian(2)}, random=True),
    "one-sided-shampoo": Case(OneSidedShampoo, unknown, solved=1e-3),
    "shampoo": Case(Shampoo, unknown, solved=1e-3),
    "kronecker-ftrl": Case(KroneckerFTRL, operator, solved=1e-3),
    "scalar-gbpa": Case(ScalarGBPA, frobenius),
    "gaussian-ftpl": Case(GaussianFTPL, operator, shapes=VECTORS[1:]),
    **ADAGRAD,
}
DISCOUNTED = [name for name, case in CASES.items() if issubclass(case.make, GBPA)]
GROWING = ("faml-grow", "faml-clip")
BOUNDED = [n for n, c in CASES.items() if c.bound is not unknown and n not in ("ftl", *GROWING)]
each = pytest.mark.parametrize("name", CASES)


def norm_in_ball(learner, action):
    """The largest norm of a batch by singular values, in whose ball the learner plays."""
    if getattr(learner, "ball", "l2") == "linf":
        return action.double().abs().max().item()
    return torch.linalg.svdvals(action.double()).max().item()


def drifting_gradients(rounds, shape, seed=0):
    """Gaussian gradients that lean to I, so that the constraint binds, ‖G_t‖_op ≤ 1."""
    source = streams.gaussian(shape, dtype=F64, seed=seed)
    gradients = torch.stack([source.gradient(t) for t in range(1, rounds + 1)])
    return (gradients + torch.eye(*shape[-2:], dtype=F64)) / 2


def played(learner, rounds=5, **options):
    """The learner after a few rounds."""
    ledger_of(learner, streams.gaussian(learner.shape, dtype=learner.dtype, **options), rounds)
    return learner


# ---- games ---------------------------------------------------------------------------------------


def test_every_learner_has_a_case_and_a_theorem_but_ftl():
    makes = {case.make for case in CASES.values()}
    assert makes == {*learners.LEARNERS.values(), GBPA}
    for name, learner in learners.LEARNERS.items():
        assert learner.name == name and (learner.theorem == "none") == (learner is FTL)


@each
def test_actions_stay_in_the_ball_and_regret_within_its_bound(name):
    case, radius = CASES[name], 2.5
    for stream, make in STREAMS.items():
        for shape in case.shapes:
            learner = case(shape, radius=radius, bound=1.5)
            source, where = make(shape, bound=1.5, dtype=F64), (stream, shape)
            for t, (_, action) in enumerate(rounds_of(learner, source, 8), start=1):
                assert action.shape == shape and action.dtype == F64
                assert norm_in_ball(learner, action) <= radius * (1 + 1e-9), where
                assert t > 1 or not action.any()
            certificate = learner.certificate()
            assert certificate.bound.shape == certificate.regret.shape == torch.Size(shape[:-2])
            covered = name != "ftl" and (source.oblivious or not case.random)
            assert (certificate.refusal is None) == covered, where
            assert certificate.holds or case.random or not covered, where
            if isinstance(learner, AdaGradOGD | AdaGradFTRL):  # far below the tolerance of 1e-8
                assert (learner.gaps <= 1e-8 * certificate.bound).all(), where


@each
def test_float32_games_keep_the_promise_and_the_bound(name):
    case, discount = CASES[name], {"discount": 0.97} if name in DISCOUNTED else {}
    rounds, kinds = 30, ("greedy", "ill-conditioned", "low-rank", "drifting", "heavy-tailed")
    shapes = ((3, 6), (6, 2)) if case.shapes is SHAPES else case.shapes[1:]
    if case.solved == 1e-3 or "full-linf" in name:  # solvers, which may take 50 ms a step
        rounds, kinds, shapes = 12, kinds[:2], shapes[:1]
    for stream, shape in itertools.product(kinds, shapes):
        learner = case(shape, dtype=torch.float32, **discount)
        source = STREAMS[stream](shape, dtype=torch.float32)
        for _, action in rounds_of(learner, source, rounds):
            assert action.dtype == torch.float32
            assert norm_in_ball(learner, action) <= 1 + 1e-5, (stream, shape)
        assert case.random or name == "ftl" or learner.certificate().holds, (stream, shape)


TALL_AND_WIDE = [(1, 1), (1, 4), (3, 3), (2, 5), (5, 2)]
DISCOUNT, ETA = {"discount": 0.9}, {"factor": 0.4}
ORACLE = {
    "FTL": lambda: beside.gbpa_games(["FTL"], TALL_AND_WIDE, variants=[{}, DISCOUNT]),
    **{
        name: lambda name=name: beside.gbpa_games(
            [name],
            TALL_AND_WIDE,
            radius=1.5,
            gradient_bound=0.8,
            variants=[{}, DISCOUNT, ETA, {"discount": 0.8, "factor": 2.5}],
        )
        for name in ("FTRL", "FTPL", "FAML")
    },
    "late": lambda: beside.gbpa_games(["FTRL", "FTPL", "FAML"], [(2, 3)], late=True),
    "projected": lambda: beside.projected_games((3, 3), radius=0.7),
    "projected, η and ε": lambda: beside.projected_games(
        (2, 3), radius=0.7, factor=0.5, epsilon=0.1
    ),
    "projected, tall": lambda: beside.projected_games((3, 2), factor=1.5, epsilon=0.1),
    "scalar": lambda: beside.scalar_game((2, 4), radius=1.5),
    "scalar, tall": lambda: beside.scalar_game((4, 2)),
    "vectors": lambda: beside.vector_games(4, radius=1.3),
    "Remark B.1": lambda: remark_unknown_bound.beside_twins(1),
}


@pytest.mark.parametrize("games", ORACLE)
def test_actions_regret_and_bound_are_the_oracle_s(games):
    for row in ORACLE[games]():
        limit = beside.EXACT if row.exact else beside.SOLVED
        assert max(row.actions, row.regret, row.bound) <= limit, row.name


@each
def test_tall_games_are_wide_ones_and_a_batch_is_its_games(name):
    case, games = CASES[name], 3
    m, n = (2, 4) if case.shapes is SHAPES else (1, 4)
    gradients = drifting_gradients(6, (games, m, n))
    batch = case((games, m, n))
    actions = actions_of(batch, gradients)
    for game in range(games):
        own = {"stream": game} if isinstance(batch, FTPL) else {}
        if name == "gbpa-random" and game:
            continue  # its noise is numbered by the batch
        wide, tall = case((m, n), **own), case((n, m), **own)
        played_wide = actions_of(wide, gradients[:, game])
        assert torch.dist(actions[:, game], played_wide) <= case.solved
        assert torch.equal(actions_of(tall, gradients[:, game].mT), played_wide.mT)
        torch.testing.assert_close(batch.bound()[game], wide.bound(), rtol=1e-7, atol=1e-12)
        torch.testing.assert_close(tall.bound(), wide.bound(), rtol=1e-12, atol=0)


@each
@pytest.mark.parametrize("scale", [2.0**-300, 2.0**300])
def test_the_scales_of_gradients_and_ball_do_not_matter(name, scale):
    case = CASES[name]
    shape = (3, 4) if case.shapes is SHAPES else (1, 4)
    gradients = drifting_gradients(6, shape)
    unit, scaled = case(shape), case(shape, bound=scale, radius=2.0**20)
    actions = actions_of(unit, gradients)
    # Powers of two change no digit of a product, only the rounding of roots.
    close = max(1e-9, case.solved)
    assert torch.dist(actions_of(scaled, scale * gradients) / 2.0**20, actions) <= close
    if name != "ftl":
        expected = unit.bound().item()
        assert scaled.bound().item() / scale / 2.0**20 == pytest.approx(expected, rel=1e-6)


@each
def test_zero_gradients_move_nothing_and_then_it_begins(name):
    case = CASES[name]
    learner = case(case.shapes[1])
    gradient = drifting_gradients(1, learner.shape)[0]
    for _ in range(3):
        assert case.random or not learner.play().any()
        learner.play()
        learner.observe(torch.zeros_like(gradient))
    assert learner.certificate().regret == 0
    learner.play()
    learner.observe(gradient)
    assert learner.play().any() and learner.play().isfinite().all()


@each
def test_without_validation_the_same_game_is_played(name):
    case = CASES[name]
    one, two = case(case.shapes[1]), case(case.shapes[1], validate=False)
    gradients = drifting_gradients(5, one.shape)
    assert torch.equal(actions_of(one, gradients), actions_of(two, gradients))
    assert torch.equal(one.bound(), two.bound())


# ---- states --------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("waits", [False, True])
def test_a_resumed_game_repeats_bit_for_bit(name, waits, tmp_path):
    case = CASES[name]
    options = {"discount": 0.9} if name in DISCOUNTED else {}
    for shape in case.shapes[1:]:
        source = streams.gaussian(shape, dtype=F64)
        learner, resumed = played(case(shape, **options)), case(shape, **options)
        if waits:
            learner.play()
        torch.save(learner.state_dict(), tmp_path / "state.pt")
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        pairs = zip(rounds_of(learner, source, 4), rounds_of(resumed, source, 4), strict=True)
        for (_, action), (_, again) in pairs:
            assert torch.equal(action, again)
        assert not differences(learner.state_dict(), resumed.state_dict())
        assert torch.equal(learner.bound(), resumed.bound())


@each
def test_states_and_actions_are_copies(name):
    case = CASES[name]
    learner = played(case(case.shapes[1]))
    state, action = learner.state_dict(), learner.play()
    other = case(case.shapes[1])
    other.load_state_dict(state)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    expected = action.clone()
    action.zero_()
    assert expected.any() and torch.equal(learner.play(), expected)
    assert torch.equal(other.play(), expected)


def test_an_action_that_awaits_its_gradient_is_saved_and_forgotten():
    learner, other = played(CASES["ftrl"]((3, 5))), CASES["ftrl"]((3, 5))
    before = learner.state_dict()
    action = learner.play()
    other.load_state_dict(learner.state_dict())
    other.observe(torch.zeros(3, 5, dtype=F64))  # no play() in between
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.play(), action)
    other.load_state_dict(before)
    with pytest.raises(RuntimeError, match=r"call play\(\) first"):
        other.observe(torch.zeros(3, 5, dtype=F64))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, "radius", 2.0) for name in CASES),
        *((name, "eta", 2.0) for name in CASES),
        *(("faml", *pair) for pair in (("method", "coupled"), ("on_excess", "clip"))),
        *((name, "gradient_bound", 2.0) for name in BOUNDED if "stated" not in name),
        *(("ftpl", *pair) for pair in (("seed", 2), ("samples", 8), ("stream", 3))),
        *(("shampoo", *pair) for pair in (("epsilon", 0.1), ("projection", "none"))),
        *(("one-sided-shampoo", *pair) for pair in (("tolerance", 1e-4), ("max_iterations", 7))),
        *((name, "delta", 2.0) for name in ADAGRAD if "stated" in name or "ogd" in name),
    ],
)
def test_a_state_of_other_options_is_refused(name, option, value):
    case = CASES[name]
    learner = played(case(case.shapes[1]))
    before = learner.state_dict()
    with pytest.raises(ValueError, match=f"the state has {option}="):
        learner.load_state_dict(case(case.shapes[1], **{option: value}).state_dict())
    assert not differences(before, learner.state_dict())


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("gram"),
        lambda s: s.update(gram=s["gram"][:2]),
        lambda s: s.update(gram=s["gram"].float()),
        lambda s: s.update(start=None),
        lambda s: s.pop("facts"),
        lambda s: s["total"].fill_(torch.nan),
        lambda s: s["gram"].fill_(torch.inf),
        lambda s: s.update(action=torch.zeros(2, 2)),
        lambda s: s.update(action=torch.full((3, 5), torch.nan, dtype=F64)),
        lambda s: s.update({"ledger.rounds": 6}),
        lambda s: s.pop("ledger.rounds"),
        lambda s: s["facts"].update(learner="faml"),
        lambda s: s["facts"].update(shape=[5, 3]),
    ],
)
def test_a_damaged_state_is_refused(damage):
    learner = played(FTRL((3, 5), dtype=F64))
    before, state = learner.state_dict(), learner.state_dict()
    damage(state)
    with pytest.raises(ValueError, match="the state"):
        learner.load_state_dict(state)
    assert not differences(before, learner.state_dict())


@pytest.mark.parametrize("state", [None, [], "state", 3])
def test_no_state_is_refused(state):
    with pytest.raises(ValueError, match="state_dict"):
        FAML((2, 3)).load_state_dict(state)


# ---- bad input -----------------------------------------------------------------------------------


def bad_gradients(shape):
    """(gradient, error, words) for a learner of a shape, float64."""
    zero = torch.zeros(shape, dtype=F64)
    yield torch.zeros(7, 7, dtype=F64), ValueError, "shape"
    yield zero[None], ValueError, "shape"
    yield zero.flatten(), ValueError, "dimensions"
    yield zero.float(), TypeError, "dtype"
    yield zero.long(), TypeError, "dtype"
    yield zero + 0j, TypeError, "dtype"
    yield zero + math.nan, ValueError, "finite"
    yield zero + math.inf, ValueError, "finite"
    yield zero + 1e200, ValueError, "Gram matrix"
    yield zero.to_sparse(), TypeError, "dense"
    yield zero.tolist(), TypeError, "Tensor"
    yield None, TypeError, "Tensor"


@each
def test_a_bad_gradient_leaves_the_state_untouched(name):
    case = CASES[name]
    learner = played(case(case.shapes[1]))
    learner.play()
    before = learner.state_dict()
    for gradient, error, words in bad_gradients(learner.shape):
        with pytest.raises(error, match=words):
            learner.observe(gradient)
        assert not differences(before, learner.state_dict()), words
    trusting = case((2, 1, 4), validate=False)
    trusting.play()
    for shape in ((1, 1, 4), (2, 1, 1), (1, 4), (2, 4, 1), (4,)):  # a broadcast would go unnoticed
        with pytest.raises(ValueError, match="shape"):
            trusting.observe(torch.zeros(shape, dtype=F64))
    assert trusting.rounds == 0


@each
def test_an_update_that_fails_leaves_the_state_untouched(name):
    case = CASES[name]
    learner = played(case(case.shapes[1]))
    learner.play()
    before, update = learner.state_dict(), learner.update

    def failing(gradient):
        update(gradient)
        raise RuntimeError("no convergence")

    learner.update = failing
    with pytest.raises(RuntimeError, match="convergence"):
        learner.observe(drifting_gradients(1, learner.shape)[0])
    assert not differences(before, learner.state_dict())


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_gradients_above_the_bound_are_refused_and_their_rounding_is_paid_for(name, dtype):
    case = CASES[name]
    shape = (3, 4) if case.shapes is SHAPES else (1, 4)
    exact, rounded = case(shape, dtype=dtype), case(shape, dtype=dtype)
    gradient = torch.eye(*shape, dtype=dtype)  # of norm exactly the bound
    above = (1 + 4 * torch.finfo(dtype).eps) * gradient
    for _ in range(4):
        for learner, g in ((exact, gradient), (rounded, above)):
            learner.play()
            learner.observe(g, oblivious=True)
    # Of AdaGrad's bound the excess is a sum of norms, of the others' one of nuclear norms.
    sides = torch.linalg.svdvals((above - gradient).double()).sum().item()
    added = (rounded.bound() - exact.bound()).item()
    assert exact.excess.item() == 0 < rounded.excess.item()
    # 8 eps for the rounding of the bounds, which are sums of order ten in float64.
    assert added >= 2 * 4 * sides * (1 - 1e-3) - 8 * 2.0**-52 * exact.bound().item()
    stated = rounded.certificate().excess
    assert stated is None or stated.item() >= 2 * 4 * sides * (1 - 1e-3)
    exact.play()
    words = r"gradient has .* norm .*, above (gradient_bound|delta)=.* state a larger"
    for excess in (1e-4, 1e-3, 0.01, 0.5):
        with pytest.raises(ValueError, match=words):
            exact.observe((1 + excess) * gradient)
    assert exact.rounds == 4


@pytest.mark.parametrize("name", [name for name in CASES if name not in DISCOUNTED])
def test_a_learner_of_the_plain_game_refuses_a_discount(name):
    with pytest.raises(ValueError, match="plain game only"):
        CASES[name](CASES[name].shapes[1], discount=0.9)


def bad_options():
    """(learner, option, value, error): the words of the error name the option."""
    for name, case in CASES.items():
        yield from ((name, "radius", x, ValueError) for x in (0.0, math.inf))
        yield name, "eta", -1.0, ValueError
        yield name, "dtype", torch.bfloat16, TypeError
        yield name, "surprise", 1, TypeError
        if "gradient_bound" in case.bound(1.0, (1, 1)):
            bounds = (0.0, -1.0, math.nan)
            yield from ((name, "gradient_bound", x, ValueError) for x in bounds)
    for tensor in (0.0, -1.0, math.nan, math.inf, [1.0, 2.0]):
        yield "faml", "gradient_bound", torch.tensor(tensor), ValueError
    yield "faml", "discount", 1.5, ValueError
    yield from (("faml-grow", "on_excess", x, ValueError) for x in ("ignore", "raise"))
    yield from (("gbpa", "potential", x, TypeError) for x in (Hyperbolic, None, "hyperbolic"))
    yield "ftpl", "samples", 0, ValueError
    yield from (("ftpl", "stream", x, e) for x, e in ((-1, ValueError), (True, TypeError)))
    yield from (("shampoo", "epsilon", x, ValueError) for x in (-0.1, math.nan))
    yield "shampoo", "projection", "frobenius", ValueError
    yield from ((n, "solver", "newton", ValueError) for n in ("ftrl", "shampoo"))
    for name in ("ftrl", "shampoo", "ogd-full-linf"):
        yield name, "tolerance", 0.0, ValueError
        yield name, "max_iterations", 0, ValueError
    for name in ("ogd-full-l2", "stated-full-l2"):
        yield name, "preconditioner", "block", ValueError
        yield name, "ball", "l1", ValueError
        yield name, "delta", -1.0, ValueError
    yield "clip-full-l2", "delta", 1.0, ValueError
    yield "clip-full-l2", "offset", "guess", ValueError
    yield "scale-free-scalar-l2", "preconditioner", "full", ValueError


@pytest.mark.parametrize(("name", "option", "value", "error"), [*bad_options()], ids=str)
def test_bad_options_are_named(name, option, value, error):
    with pytest.raises(error, match=option):
        CASES[name](CASES[name].shapes[1], **{option: value})


@each
@pytest.mark.parametrize("shape", [(3,), (2, 2, 2, 2), (0, 3), (2.0, 3), "ab"], ids=str)
def test_bad_shapes_are_refused(name, shape):
    with pytest.raises((ValueError, TypeError), match="shape"):
        CASES[name].make(shape, **CASES[name].options)
    if CASES[name].shapes is not SHAPES:
        with pytest.raises(ValueError, match="shape must be a row"):
            CASES[name].make((2, 3))
