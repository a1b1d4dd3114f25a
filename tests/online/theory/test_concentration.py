"""The deviations of FTPL's samples: by hand, against simulated tails, and where they must grow."""

import math

import mpmath
import numpy as np
import pytest
import torch

from nucleon.linalg.norms import nuclear_norm
from nucleon.online import streams, theory
from nucleon.online.game import play
from nucleon.online.learners import FTPL

F64 = torch.float64


def test_oblivious_deviation_by_hand():
    norms = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=F64)
    found = theory.ftpl_oblivious_deviation(norms, radius=2.0, samples=8, delta=0.01)
    scale = 2 * math.sqrt(2 * math.log(100) / 8)
    assert found.tolist() == pytest.approx([5 * scale, scale])
    kept = theory.ftpl_oblivious_deviation(norms, radius=2.0, samples=8, delta=0.01, redraw=False)
    assert kept.tolist() == pytest.approx([7 * scale, scale])
    summed = norms.square().sum(-1, keepdim=True).sqrt()
    again = theory.ftpl_oblivious_deviation(summed, radius=2.0, samples=8, delta=0.01)
    assert again.tolist() == pytest.approx(found.tolist())


@pytest.mark.parametrize("samples", [1, 4, 100, 10_000])
@pytest.mark.parametrize("delta", [0.1, 1e-6])
def test_adaptive_deviation_solves_bernstein_s_equation(samples, delta):
    norms = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    options = {"rows": 2, "columns": 5, "radius": 3.0, "samples": samples, "delta": delta}
    found = theory.ftpl_adaptive_deviation(norms, **options).item()
    log = mpmath.log(7 * 3 / mpmath.mpf(delta))
    root = max(mpmath.polyroots([mpmath.mpf(samples) / 2, -2 * log / 3, -log]))
    assert found == pytest.approx(3 * 6 * float(min(2, root)), rel=1e-12)
    assert found <= 3 * 6 * min(2, math.sqrt(8 * log / samples))  # Hoeffding's
    summed = theory.ftpl_adaptive_deviation(norms.sum().reshape(1), rounds=3, **options)
    assert summed.item() == pytest.approx(found)


def test_bernstein_s_probability_holds_for_polar_factors_of_noise():
    """The worst variance there is: 1×1 signs, and 2×3 isometries drawn uniformly."""
    rng = np.random.default_rng(0)
    draws, k, delta = 4000, 12, 0.05
    for m, n in ((1, 1), (2, 3)):
        u, _, v = np.linalg.svd(rng.standard_normal((draws, k, m, n)), full_matrices=False)
        means = (u @ v).mean(1)
        norms = np.linalg.norm(means, 2, axis=(-2, -1))
        bound = theory.ftpl_adaptive_deviation(
            torch.ones(1, dtype=F64), rows=m, columns=n, radius=1.0, samples=k, delta=delta
        )
        assert (norms > bound.item()).mean() <= delta
        quantile = np.quantile(norms, 1 - delta)
        assert quantile >= 0.35 * bound.item()  # not looser than the dimensions explain


def test_hoeffding_s_tail_is_the_order_of_the_games_own():
    """1×1, signs of nearly centered noise: the normal quantile 2.33 beside √(2 log 100) = 3.03."""
    rounds, games, delta = 50, 4000, 0.01
    learner = FTPL((games, 1, 1), samples=1, dtype=F64)
    stream = streams.alternating((games, 1, 1), dtype=F64)
    trace = play(learner, stream, rounds)
    norms = torch.stack([nuclear_norm(stream.gradient(t))[0] for t in range(1, rounds + 1)])
    term = theory.ftpl_oblivious_deviation(norms, radius=1.0, samples=1, delta=delta)
    regret = trace.regret[-1]
    excess = regret - regret.mean()
    assert (excess > term).double().mean() <= delta
    share = (excess.quantile(1 - delta) / term).item()
    # padding to width 3 leaves a third of the variance in the one entry that is played
    assert share == pytest.approx(2.326 / math.sqrt(2 * math.log(100)) / math.sqrt(3), rel=0.1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"samples": 0}, "samples"),
        ({"radius": -1.0}, "radius"),
    ],
)
def test_bad_options_are_named(change, match):
    good = {"radius": 1.0, "samples": 4, "delta": 0.1}
    norms = torch.ones(3, dtype=F64)
    with pytest.raises(ValueError, match=match):
        theory.ftpl_oblivious_deviation(norms, **{**good, **change})
    with pytest.raises(ValueError, match=match):
        theory.ftpl_adaptive_deviation(norms, rows=1, columns=1, **{**good, **change})


def test_bad_norms_are_named():
    for norms in (torch.tensor(1.0), torch.ones(0), torch.tensor([-1.0])):
        with pytest.raises(ValueError, match="gradient_nuclear_norms"):
            theory.ftpl_oblivious_deviation(norms, radius=1.0, samples=1, delta=0.1)
