"""The claims on the conversion: what they measure."""

import math

import pytest
import torch

from nucleon.claims import Settings
from nucleon.claims.conversions import Measured
from nucleon.claims.engine import Run
from nucleon.claims.processes import o2nc, thm_leon
from nucleon.online.learners import FAML, FTL
from nucleon.online.problems.kinks import random_kinks

F64 = torch.float64


def shortened(found, rounds):
    object.__setattr__(found.complexity, "rounds", rounds)
    return found


def test_the_conversion_of_a_slope_by_hand():
    slope = Measured(**o2nc.clipped_slope(600, 16, 0))
    # The slope is 1 all along; ΔL/(DT) = 1.05(T−1)/T by the corrected term.
    torch.testing.assert_close(slope.gap, torch.ones(16, dtype=F64), rtol=1e-9, atol=0)
    assert slope.descent == pytest.approx([1.05 * 599 / 600] * 16)
    # A straight path: the mean absolute deviation of a geometric time, 2/e·D/(1−γ), D = ρ(1−γ)/2γ.
    distances = o2nc.ewa_distances(slope._history.weights, o2nc.DISCOUNT)
    largest = max(distance.high for _, distance in distances)
    assert largest == pytest.approx(math.exp(-1) / 0.99, rel=0.05)


def test_the_scaling_check_can_fail():
    """For lengths that are not exponential the identity is false by many standard errors."""
    problem = random_kinks(0)

    def errors():
        return o2nc.scaling_errors(o2nc.scaling_samples(problem, 8000, 0))

    assert errors() < o2nc.MOST_ERRORS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(o2nc.noise, "exponential", lambda shape, **k: torch.ones(shape, dtype=F64))
        assert not errors() < o2nc.MOST_ERRORS
        patch.setattr(o2nc.noise, "exponential", o2nc.noise.uniform)
        assert errors() > 2 * o2nc.MOST_ERRORS


def test_distances_by_hand():
    """Two points with the weights γ/(1+γ) and 1/(1+γ), at a distance of 1 from each other."""
    path = torch.zeros(2, 3, 2, 2, dtype=F64)
    path[1, :, 0, 0] = 1.0
    found = dict(o2nc.ewa_distances(path, 0.5))
    assert list(found) == [2]
    assert found[2].value == pytest.approx(2 * (1 / 3) * (2 / 3))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_plans_are_valid_and_not_trivial(seed, quick):
    run = Run(Settings(quick, 2, seed))
    for optimizer in ("leon", "pion"):
        for target in (thm_leon.kinks(run, optimizer), thm_leon.resistance(run, optimizer)):
            assert target.plan.kind == "reachable" and target.plan.rounds < 50_000
            assert all(check.passed for check in thm_leon.premises(target))


def resisted(runs):
    """Resistance at the full run's ε and b, and the quick run's height."""
    return thm_leon.resistance(Run(Settings(seeds=runs)), "leon", (0.09, 0.09))


def test_leon_arrives_where_muon_is_kept():
    """The resisted walk alone, with the lengths' mean as an oracle of the time it takes.

    Leon's first row moves by nearly D a step, so it needs about ΔL/D steps, during which the mean
    gradient is 1; Muon measures the slope 1 for ever.
    """
    target = resisted(8)
    shortened(target.plan, 1000)  # of 2500: enough to arrive, and for Muon not to
    leon, muon = (Measured(**target.run(learner)) for learner in (FAML, FTL))
    share = 0.09 / target.plan.radius / target.plan.rounds
    assert 0.8 * share < leon.mean_gap.value < 1.5 * share
    assert muon.mean_gap.low > 0.999 > target.epsilon
    # What makes the difference is the regret: (1−γ)Reg is about b for Muon.
    assert muon.regret.mean() > 1.2 and leon.regret.mean() < 0.05


def test_the_fall_is_what_the_sum_of_the_losses_telescopes_to():
    """Without noise left − right is a martingale: 0 in the mean, so ΔL overstates the right side.

    Muon climbs under resistance, so its descent term is negative.
    """
    target = resisted(32)
    shortened(target.plan, 300)
    for learner in (FAML, FTL):
        measured = Measured(**target.run(learner))
        excess = measured.excess(4.5)
        assert excess.low <= 0 <= excess.high
    assert measured.descent.mean() < 0
