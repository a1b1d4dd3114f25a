"""The worst-case search: its function is the game's, it climbs, and its files keep their word."""

import json

import pytest
import torch

from nucleon.online import streams
from nucleon.online.adversary import build, measure, regret_ratio, search
from nucleon.online.game import play
from nucleon.online.learners import FAML, FTL, FTRL, Shampoo
from nucleon.online.potentials import Gaussian, Hyperbolic, Nuclear, Regularized
from nucleon.online.streams import WorstCase, worst_cases
from nucleon.online.streams.worst_case import to_units

F64 = torch.float64
SHAPES = [(1, 1), (2, 2), (2, 4), (3, 4)]


def random_stream(rounds, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rounds, *shape, dtype=F64, generator=generator)
    return x / torch.linalg.matrix_norm(x, 2).clamp(min=1)[:, None, None]


# ---- the function that is climbed ---------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("learner", ["faml", "ftrl"])
def test_the_ratio_climbed_is_the_one_played(learner, shape):
    gradients = random_stream(12, shape)
    potential = Hyperbolic() if learner == "faml" else Regularized(tolerance=1e-11)
    found = regret_ratio(potential, gradients, eta=build(learner, shape).eta)
    # The slopes are central differences of step h = 0.01: off by h²/6 of third derivatives ≤ 1.
    assert found.item() == pytest.approx(measure(learner, gradients).value, abs=1e-3)


def test_ftpl_s_ratio_is_that_of_the_mean():
    gradients = random_stream(8, (1, 1), seed=3)
    potential = Gaussian(40_000, antithetic=True)
    found = regret_ratio(potential, gradients, eta=build("ftpl", (1, 1)).eta)
    played = measure("ftpl", gradients)
    assert 0 < played.margin < 0.02
    # margin is three standard errors; the sampled ratio has a twentieth of that
    assert abs(found.item() - played.value) <= 2 * played.margin


@pytest.mark.parametrize("potential", [Hyperbolic(), Regularized(tolerance=1e-12)])
def test_its_derivative_is_the_difference_quotient(potential):
    """Also where eigenvalues repeat: the first Grams here are multiples of the identity."""
    gradients = random_stream(6, (2, 3))
    gradients[0] = torch.eye(2, 3)
    eta = potential.admissibility(2, 3).eta
    leaf = gradients.clone().requires_grad_()
    regret_ratio(potential, leaf, eta=eta).backward()
    for t, i, j in [(0, 0, 0), (1, 0, 2), (3, 1, 1), (5, 1, 0)]:
        step = torch.zeros_like(gradients)
        step[t, i, j] = 1e-5
        ahead, behind = (regret_ratio(potential, gradients + s, eta=eta) for s in (step, -step))
        quotient = ((ahead - behind) / 2e-5).item()
        assert leaf.grad[t, i, j].item() == pytest.approx(quotient, abs=2e-5)


def test_a_potential_without_constants_is_refused():
    with pytest.raises(ValueError, match="no admissibility constants"):
        regret_ratio(Nuclear(), random_stream(4, (2, 2)), eta=1.0)


# ---- the search ---------------------------------------------------------------------------------


@pytest.mark.parametrize("learner", ["faml", "ftrl", "ftpl"])
def test_the_ascent_climbs_and_is_determined_by_its_seed(learner):
    options = {"starts": 4, "seed": 2}
    start = search(learner, (2, 2), 12, steps=0, **options)
    found = search(learner, (2, 2), 12, steps=40, **options)
    assert found.ratio > start.ratio + 0.01  # the alternating starts are good ones
    again = search(learner, (2, 2), 12, steps=40, **options)
    assert torch.equal(found.gradients, again.gradients) and found.ratio == again.ratio
    assert float(torch.linalg.matrix_norm(found.gradients, 2).max()) <= 1
    assert found.ratio == measure(learner, found.gradients, first_seed=2).value


def test_it_finds_what_is_known_of_one_dimension():
    """T = 200: 0.85 of FAML's bound and 0.92 of FTRL's in 200 steps."""
    assert search("faml", (1, 1), 200).ratio >= 0.85
    assert search("ftrl", (1, 1), 200).ratio >= 0.92


def test_any_gbpa_learner_can_be_searched_against():
    def halved(shape, seed):
        return FAML(shape, eta=0.5, dtype=F64)

    found = search(halved, (1, 2), 10, starts=2, steps=5)
    assert found.file_name == "faml-1x2-10.json"
    assert found.ratio == pytest.approx(
        ratio_on(streams.replay(found.gradients), halved((1, 2), 0)), abs=1e-12
    )
    at_eta = regret_ratio(Hyperbolic(), found.gradients, eta=0.5).item()
    assert at_eta == pytest.approx(found.ratio, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"learner": "ftl"}, "learner"),
        ({"learner": lambda s, _: FAML(s, discount=0.5)}, "discount 1, got 1, 1.0 and 0.5"),
        ({"learner": lambda s, _: FTL(s)}, "Nuclear has no admissibility"),
        ({"learner": lambda s, _: Shampoo(s)}, "derived from GBPA"),
        ({"shape": (4, 2)}, "m ≤ n"),
        ({"rounds": 1}, "rounds"),
    ],
)
def test_bad_arguments_are_named(change, match):
    good = {"learner": "faml", "shape": (1, 1), "rounds": 5, "steps": 1}
    with pytest.raises(ValueError, match=match):
        search(**{**good, **change})


# ---- the files ----------------------------------------------------------------------------------


def test_units_keep_the_norm_and_a_first_gradient():
    gradients = random_stream(50, (2, 4))
    gradients /= torch.linalg.matrix_norm(gradients, 2)[:, None, None]
    gradients[0] = 0
    units = to_units(gradients)
    assert float(torch.linalg.matrix_norm(units, 2).max()) <= 1
    assert torch.equal((units * 10_000).round() / 10_000, units)
    assert units[0].abs().sum().item() == 1e-4
    torch.testing.assert_close(units, gradients, rtol=0, atol=4e-4)


def test_a_file_comes_back_as_it_went(tmp_path):
    case = WorstCase("faml", to_units(random_stream(5, (2, 3))), 0.5, 0.0, {"seed": 1})
    path = case.save(tmp_path / "new")
    assert path.name == "faml-2x3-5.json" and [path] == list(path.parent.iterdir())
    back = WorstCase.load(path)
    assert torch.equal(back.gradients, case.gradients)
    assert (back.learner, back.ratio, back.margin, back.search) == ("faml", 0.5, 0.0, {"seed": 1})
    assert [c.file_name for c in worst_cases(tmp_path / "new")] == [path.name]


@pytest.mark.parametrize("damage", ["cut", "version", "flat"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = WorstCase("faml", to_units(random_stream(5, (2, 3))), 0.5, 0.0, {}).save(tmp_path)
    values = json.loads(path.read_text())
    changes = {
        "version": {"version": 9},
        "flat": {"gradients": [1, 2]},
    }
    text = path.read_text()[:-40] if damage == "cut" else json.dumps(values | changes[damage])
    path.write_text(text)
    with pytest.raises(ValueError, match=path.name):
        WorstCase.load(path)


CASES = worst_cases()


def test_the_kept_streams_are_complete():
    found = {(c.learner, c.shape) for c in CASES}
    assert found == {(n, s) for n in ("faml", "ftrl", "ftpl") for s in ((1, 1), (2, 2), (2, 4))}
    assert all(
        {10, 30, 100} <= {c.rounds for c in CASES if (c.learner, c.shape) == k} for k in found
    )


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.learner != "ftpl"], ids=lambda c: c.file_name
)
def test_a_kept_stream_reaches_its_ratio(case):
    # The same learner on the same numbers: what differs is the rounding of another BLAS.
    assert measure(case.learner, case.gradients).value == pytest.approx(case.ratio, abs=1e-6)


# ---- as a stream --------------------------------------------------------------------------------


def ratio_on(stream, learner):
    trace = play(learner, stream, stream.rounds)
    return (trace.regret[-1] / trace.bound[-1]).max().item()


def test_the_stream_by_name_in_any_basis_and_scale():
    (case,) = (c for c in CASES if c.file_name == "faml-2x4-30.json")
    plain = streams.worst((2, 4), rounds=30, dtype=F64)
    assert plain.oblivious and plain.rounds == 30 and plain.name == "worst"
    # `exact=False` streams shrink by a few roundings, so that the bound holds in any dtype
    assert ratio_on(plain, FAML((2, 4), dtype=F64)) == pytest.approx(case.ratio, abs=1e-9)
    turned = streams.worst((3, 2, 4), rounds=30, seed=5, dtype=F64)
    assert not torch.allclose(turned.gradient(3)[0], turned.gradient(3)[1])
    assert ratio_on(turned, FAML((3, 2, 4), dtype=F64)) == pytest.approx(case.ratio, abs=1e-9)
    tall = streams.worst((4, 2), rounds=30, bound=7.0, dtype=F64)
    learner = FAML((4, 2), gradient_bound=7.0, dtype=F64)
    assert ratio_on(tall, learner) == pytest.approx(case.ratio, abs=1e-9)
    longest = streams.worst((2, 2), learner="ftrl")
    assert longest.rounds == max(c.rounds for c in CASES if c.shape == (2, 2))
    assert ratio_on(longest, FTRL((2, 2))) > 0.9


def test_a_stream_from_a_file_and_what_is_not_kept(tmp_path):
    path = WorstCase("faml", to_units(random_stream(5, (2, 3))), 0.5, 0.0, {}).save(tmp_path)
    stream = streams.worst((2, 3), file=path, dtype=F64)
    torch.testing.assert_close(stream.gradient(2), WorstCase.load(path).gradients[1])
    with pytest.raises(ValueError, match="of shape"):
        streams.worst((3, 3), file=path)
    with pytest.raises(ValueError, match="faml-2x4-30"):
        streams.worst((2, 4), rounds=31)
    with pytest.raises(ValueError, match="learner='ftl'"):
        streams.worst((2, 4), learner="ftl")
