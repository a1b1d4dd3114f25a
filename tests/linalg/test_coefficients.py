from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.linalg.coefficients import (
    HALF_LOWER_BOUND,
    HALF_RESTART,
    HALF_SQUARES,
    REACH,
    Iteration,
    bound_for,
    contracted,
    half_polar_express,
    image,
    muon,
    polar_express,
    qdwh,
    quintics,
    reached,
    scaled_newton,
    steps_for,
)

INTERVALS = [1e-6, 1e-3, 0.0241, 0.1, 0.5, 0.9, 0.99, 0.9985, 0.9995, 0.99995]

# The figures printed in "The Polar Express" (arXiv 2505.16932), Algorithm 1: lower bound 1e-3,
# cushion 0.0240…, before its safety factor.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
]

lower_bounds = st.floats(-14, -0.001).map(lambda e: 10.0**e)


def evaluate(p, x):
    a, b, c = p
    return x * (a + x**2 * (b + x**2 * c))


def compose(sequence, x):
    for p in sequence:
        x = evaluate(p, x)
    return x


def grid(lower, upper, size=20_001):
    """Dense near both ends, in every decade between."""
    even = np.linspace(lower, upper, size)
    return np.union1d(even, np.geomspace(lower, upper, size)) if lower > 0 else even


@pytest.mark.parametrize("lower", INTERVALS)
def test_single_quintic_equioscillates(lower):
    """Chebyshev: four alternating extremes of equal size make an odd quintic the best one."""
    (p,) = polar_express(lower, 1, cushion=0.0)
    x = grid(lower, 1.0)
    error = 1 - evaluate(p, x)
    level = abs(error).max()
    # Rounding in p is a few eps times its largest coefficient.
    rounding = 8 * 2.0**-52 * max(map(abs, p))
    signs = np.sign(error[abs(error) > level * (1 - 1e-5) - rounding])
    alternations = 1 + np.count_nonzero(np.diff(signs))
    assert alternations >= 4
    assert error[0] == pytest.approx(level, rel=1e-9, abs=rounding)
    assert error[-1] == pytest.approx(-level, rel=1e-9, abs=rounding)


@pytest.mark.parametrize("lower", [0.999989, 0.999991, 0.9999999, 1.0])
def test_narrow_interval_is_flat_to_rounding(lower):
    """A quintic that agrees with 1 to third order at the centre errs by 5(1−l)³/16 at the ends."""
    (p,) = polar_express(lower, 1, cushion=0.0)
    error = abs(1 - evaluate(p, np.linspace(lower, 1.0, 1001))).max()
    assert error <= 5 * (1 - lower) ** 3 / 16 + 4 * 2.0**-52 * max(map(abs, p))


def test_published_figures():
    ours = polar_express(1e-3, len(PUBLISHED), (0.0,) * len(PUBLISHED), 0.02407327424182761)
    np.testing.assert_allclose(ours, PUBLISHED, rtol=1e-12)


def test_default_cushion_keeps_a_tenth():
    (p,) = polar_express(1e-9, 1)
    x = grid(0.02407327424182761, 1.0)
    assert evaluate(p, x).min() / evaluate(p, x).max() == pytest.approx(0.1, rel=1e-9)


@settings(deadline=None, max_examples=50)
@given(lower=lower_bounds, steps=st.integers(1, 12), excess=st.floats(0, 0.01))
def test_the_images_of_polar_express(lower, steps, excess):
    """p(l) ≥ l and u = 2 − l after each step; the contracted sequence maps [0, 1] into itself.

    Every value may be up to 1% too large before each step and none grows beyond 2.02.
    """
    sequence, previous, rounding = polar_express(lower, steps), lower, 1e-13
    for k in range(1, steps + 1):
        low, high = image(sequence[:k], lower, 1.0)
        values = compose(sequence[:k], grid(lower, 1.0, 2001))
        assert low - rounding <= values.min() and values.max() <= high + rounding
        assert low >= previous * (1 - rounding) and high <= 2 - low + rounding
        previous = low
    x = grid(0.0, 1.0, 4001)
    values = compose(contracted(sequence), x)
    assert -rounding <= values.min() and values.max() <= 1 + rounding
    assert image(contracted(sequence), 0.0, 1.0)[1] == pytest.approx(1.0, abs=1e-14)
    for p in sequence[:-1]:
        x = evaluate(p, x * (1 + excess))
        assert x.min() >= -1e-9 and x.max() <= 2 + 1e-9


@settings(deadline=None, max_examples=100)
@given(
    p=st.tuples(*[st.floats(-5, 5)] * 3),
    ends=st.tuples(st.floats(0, 2), st.floats(0, 2)).map(sorted),
)
def test_image_of_any_quintic(p, ends):
    low, high = image([p], *ends)
    values = evaluate(p, np.linspace(*ends, 4001))
    # A turning point may fall between grid points: |p''|h²/8 with |p''| ≤ 6|b|u + 20|c|u³.
    slack = (6 * abs(p[1]) * 2 + 20 * abs(p[2]) * 8) * ((ends[1] - ends[0]) / 4000) ** 2 / 8 + 1e-12
    assert values.min() - slack <= low <= values.min() + 1e-12
    assert values.max() - 1e-12 <= high <= values.max() + slack


def test_muon_is_torchs_default():
    torch_muon = pytest.importorskip("torch.optim._muon")
    assert muon() == (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C)


def short_of_one(method, lower, steps, x):
    """The largest distance from 1 after steps from `x`, by the scalar recursion."""
    if method == "qdwh":
        for a, b, c in qdwh(lower, steps)[0]:
            x = x * (a + b * x**2) / (1 + c * x**2)
    elif method == "scaled-newton":
        for factor in scaled_newton(lower, steps)[0]:
            x = (factor * x + 1 / (factor * x)) / 2
        x = 1 / x
    else:
        x = compose(quintics(method, lower, steps), x)
    return abs(1 - x).max()


@settings(deadline=None, max_examples=30)
@given(lower=lower_bounds, tolerance=st.floats(-12, -1).map(lambda e: 10.0**e))
def test_steps_are_enough_and_one_fewer_is_not(lower, tolerance):
    x = grid(lower, 1.0, 1001)
    for method in get_args(Iteration):
        steps = steps_for(method, lower, tolerance)
        assert short_of_one(method, lower, steps, x) <= tolerance + 1e-13
        # The ends belong to the grid, so the worst point of each method but Polar Express is seen;
        # its contracted worst point is the lower end up to equioscillation.
        fewer = steps > 1 and short_of_one(method, lower, steps - 1, x)
        assert steps == 1 or fewer > tolerance * (1 - 1e-3)


def test_step_counts_of_the_literature():
    """Condition 1e16: six QDWH steps (Nakatsukasa et al.), nine scaled Newton (Byers, Xu)."""
    assert steps_for("qdwh", 1e-16, 2.0**-52) == 6
    assert steps_for("scaled-newton", 1e-16, 2.0**-52) == 9


@pytest.mark.parametrize("method", get_args(Iteration))
def test_steps_end_when_rounding_does(method):
    assert steps_for(method, 1e-4, 0.0) <= 40


@pytest.mark.parametrize("method", get_args(Iteration))
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_the_bound_of_a_number_of_steps_is_the_least_they_serve(method, steps):
    bound = bound_for(method, steps)
    assert reached(method, bound, steps) >= REACH
    assert bound <= 1e-12 * (1 + 1e-9) or reached(method, 0.999 * bound, steps) < REACH


@pytest.mark.parametrize("lower", [1e-8, 1e-3, 0.1, 0.5])
def test_qdwh_weights_are_the_best(lower):
    """No map x(a + bx²)/(1 + cx²) with f(1) = 1 has a larger min/max on [lower, 1]."""
    (weights,), reached = qdwh(lower, 1)
    x = grid(lower, 1.0, 2001)

    def quality(a, b, c):
        y = x * (a + b * x**2) / (1 + c * x**2)
        return y.min() / y.max()

    assert quality(*weights) == pytest.approx(reached, rel=1e-6)
    generator = np.random.default_rng(0)
    for width in (1.0, 0.1, 0.01):
        for a, c in np.array(weights)[[0, 2]] * np.exp(width * generator.normal(size=(300, 2))):
            assert quality(a, 1 + c - a, c) <= reached * (1 + 1e-5)


def test_squares_take_the_place_of_two_quintics():
    """In the unit interval from 0 on, nearer to 1 than the quintics where those are meant to be."""
    sequence = half_polar_express(5)
    lower, upper = image(sequence[:HALF_RESTART], HALF_LOWER_BOUND, 1.0)
    upper *= 1.15
    values = squared(grid(0.0, upper))
    assert values.min() >= 0 and values.max() <= 0.995 + 1e-6  # six digits
    x = grid(lower, upper)
    error = squared(x) - (squared(x).min() + squared(x).max()) / 2
    quintics = compose(sequence[HALF_RESTART:], x)
    assert abs(error).max() < 0.65 * (quintics.max() - quintics.min()) / 2
    # Twelve coefficients less the scales of three intermediate q: ten equal extremes are the best.
    changes = np.flatnonzero(np.diff(np.sign(error))) + 1
    extremes = [abs(part).max() for part in np.split(error, changes)]
    assert len(extremes) == 10 and min(extremes) > 0.999 * max(extremes)


def squared(x):
    """x·q after all squares."""
    q = x**2
    for a, b, c in HALF_SQUARES:
        q = a * q**2 + b * x**2 + c
    return x * q
