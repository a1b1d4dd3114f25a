"""The plan against the printed formulas, its verdicts, the estimates and the command."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from nucleon.cli.plan import plan as verb
from nucleon.online import theory
from nucleon.online.o2nc.plans import MARGIN, Estimates, Interval, estimate, plan

GIVEN = {"rho": 1.0, "q_nuclear": 3.0, "loss_gap": 2.0, "gradient_bound": 1.0, "shapes": [(8, 16)]}


def test_leon_by_hand():
    planned = plan("leon", epsilon=0.5, **GIVEN)
    assert planned.kind == "reachable" and "576000 rounds" in planned.verdict
    assert planned.discount == pytest.approx(1 - (0.5 / 60) ** 2, rel=1e-15)
    assert planned.radius == pytest.approx((0.5 / 60) ** 2 / 2 / planned.discount, rel=1e-12)
    assert planned.rounds == 576_000  # 4000·9·2/0.125
    assert planned.bound.total <= 0.5


def test_pion_pads_to_its_width():
    """8×16 is its own width 16: C⁴ = 16/7. 8×8 is padded to 16."""
    leon, pion = (plan(name, epsilon=0.5, **GIVEN) for name in ("leon", "pion"))
    square = plan("pion", epsilon=0.5, **{**GIVEN, "shapes": [(8, 8)]})
    tall = plan("pion", epsilon=0.5, **{**GIVEN, "shapes": [(16, 8)]})
    assert pion.rounds == math.ceil(576_000 * (16 / 7) ** 0.5)
    assert square.rounds == tall.rounds == pion.rounds
    assert 1 - pion.discount == pytest.approx((1 - leon.discount) / (16 / 7) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("epsilon", [3.0, 10.0, 1e6])
def test_a_trivial_target_is_said_to_be_so(epsilon):
    target = plan("leon", epsilon=epsilon, **GIVEN)
    assert target.kind == "trivial" and "trivial" in target.verdict
    with pytest.raises(ValueError, match="nothing to plan"):
        _ = target.rounds


def test_a_target_outside_the_conditions_is_said_to_be_so():
    loud, limit = {**GIVEN, "gradient_bound": 100.0}, 10 * math.sqrt(2) * 9 / 800
    refused = plan("leon", epsilon=0.5, **loud)
    assert refused.kind == "not covered" and f"{limit:.6g}" in refused.verdict
    # Just inside the limit it says, the theorem applies and keeps its promise.
    covered = plan("leon", epsilon=0.999 * limit, **loud)
    assert covered.kind == "reachable" and covered.bound.total <= 0.999 * limit


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 1e-9},
        {"epsilon": 1e-200},
        {"rho": 5e-324},
        {"loss_gap": 1e308},
        {"gradient_bound": 1e307},
        {"q_nuclear": 1e307},
    ],
)
@pytest.mark.parametrize("optimizer", ["leon", "pion"])
def test_what_float64_cannot_hold_is_out_of_reach(optimizer, change):
    far = plan(optimizer, **{"epsilon": 0.5, **GIVEN, **change})
    assert far.kind == "out of reach" and "larger epsilon" in far.verdict
    with pytest.raises(ValueError, match="nothing to plan"):
        _ = far.rounds
    assert plan(optimizer, epsilon=1e-4, **GIVEN).kind == "out of reach"  # of too many rounds


def test_tiny_units_plan_as_usual():
    """ε, ‖Q‖_* and G in units of 1e-200 and ρ in 1e200: the same T."""
    units = {"q_nuclear": 3e-200, "gradient_bound": 1e-200, "rho": 1e200, "shapes": [(8, 16)]}
    assert plan("leon", epsilon=0.5e-200, loss_gap=2.0, **units).rounds == pytest.approx(576_000)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rho": 0.0}, "rho"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"q_nuclear": 0.0}, "q_nuclear"),
        ({"loss_gap": -1.0}, "loss_gap"),
        ({"gradient_bound": math.inf}, "gradient_bound"),
        ({"gradient_bound": [1.0, 2.0]}, "one for each of 1 shapes, got 2"),
        ({"shapes": [(0, 3)]}, "shapes"),
        ({"shapes": [(2, 3, 4)]}, r"shapes must name \(m, n\)"),
        ({"shapes": []}, r"shapes must name \(m, n\)"),
        ({"optimizer": "muon"}, "no theorem"),
    ],
)
def test_bad_targets_are_named(change, word):
    with pytest.raises(ValueError, match=word):
        plan(**{"optimizer": "leon", "epsilon": 0.5, **GIVEN, **change})


def test_several_matrices_add_their_rows_and_bounds():
    """𝒬 = 1 in all and G = 1 for each row: of forty rows 𝒢 = 40, and ε ≤ 10√2/40."""
    target = {"rho": 1.0, "q_nuclear": 1.0, "loss_gap": 1.0, "gradient_bound": 1.0}
    assert plan("leon", epsilon=0.8, shapes=[(1, 9)], **target).kind == "reachable"
    forty = {"shapes": [(1, 9)] * 40, **target}
    refused = plan("leon", epsilon=0.8, **forty)
    assert refused.kind == "not covered" and f"{10 * math.sqrt(2) / 40:.6g}" in refused.verdict
    inside = plan("leon", epsilon=0.999 * 10 * math.sqrt(2) / 40, **forty)
    assert inside.kind == "reachable"
    assert inside.complexity.terms["gradient_bound"] == pytest.approx(
        10 * math.sqrt(2) * 40 / (0.999 * 10 * math.sqrt(2) / 40)
    )
    # One bound for each, of tall and wide: 𝒢 = 2·3 + 1·5.
    each = {**target, "q_nuclear": 4.0, "gradient_bound": [3.0, 5.0]}
    mixed = plan("leon", epsilon=0.5, shapes=[(7, 2), (1, 4)], **each)
    assert mixed.complexity.terms["gradient_bound"] == pytest.approx(10 * math.sqrt(2) * 11 / 0.5)


def test_pion_takes_the_largest_factor_of_its_matrices():
    """n′ = 16 of 8×16 gives C⁴ = 16/7, n′ = 64 of 2×64 gives 64/61."""
    alone = plan("pion", epsilon=0.5, **GIVEN)
    both = plan("pion", epsilon=0.5, **{**GIVEN, "shapes": [(2, 64), (8, 16)]})
    assert both.discount == alone.discount and both.rounds == alone.rounds


# ---------------------------------------------------------------------- the estimates


def model(seed, batches, spread):
    """A linear loss ⟨A_i, W⟩ + ½: the gradient of batch i is A_i, whatever the weights."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.tensor([[1.0, 0, 0], [0, 2.0, 0]], dtype=torch.float64)
    draws = torch.randn(batches, 2, 3, generator=generator, dtype=torch.float64)
    return base + spread * draws


def test_exact_batches_give_exact_estimates():
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    estimates = estimate(weight, lambda a: (a * weight).sum() + 0.5, model(0, 5, 0.0), lower=0.25)
    assert estimates.q_nuclear.value == pytest.approx(3.0, rel=1e-12)
    assert estimates.q_nuclear.high - estimates.q_nuclear.low < 1e-6  # of rounding: √(eps)
    assert estimates.gradient_bounds == pytest.approx((2.0,), rel=1e-12)
    assert estimates.shapes == ((2, 3),)
    assert estimates.loss_gap.value == pytest.approx(0.25)
    assert torch.equal(weight.grad, torch.ones_like(weight)) and not weight.any()


def test_the_intervals_cover():
    """200 estimates of 24 batches: ± 3 jackknife standard errors miss the truth 8 times at most.

    The truth is Tr√(E AAᵀ) = Σ√(bᵢ² + 3·spread²). A normal interval of three standard errors, the
    error itself estimated from 24, misses about 0.6 % of the time; 8 of 200 has odds below 1e-4.
    """
    truth = math.sqrt(1 + 3 * 0.09) + math.sqrt(4 + 3 * 0.09)
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    missed = 0
    for seed in range(200):
        q = estimate(weight, lambda a: (a * weight).sum(), model(seed, 24, 0.3)).q_nuclear
        missed += not q.low <= truth <= q.high
    assert missed <= 8


@pytest.mark.slow
def test_the_jackknife_removes_the_bias():
    """1000 estimates of 2 batches: the plain figure is too small by 6 errors, ours by 3 at most."""
    truth = math.sqrt(1 + 3 * 0.25) + math.sqrt(4 + 3 * 0.25)
    weight = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
    ours, plain = [], []
    for seed in range(1000):
        batches = model(seed, 2, 0.5)
        ours.append(estimate(weight, lambda a: (a * weight).sum(), batches).q_nuclear.value)
        gram = np.mean([a @ a.T for a in batches.numpy()], axis=0)
        plain.append(np.sqrt(np.linalg.eigvalsh(gram)).sum())
    error = np.std(ours) / math.sqrt(1000)
    assert truth - np.mean(plain) > 6 * error
    assert abs(np.mean(ours) - truth) < 3 * error


def test_several_parameters_add_up():
    weights = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4, 2))]

    def loss(scale):
        return scale * (weights[0][0, 0] + 3 * weights[1][1, 1])

    estimates = estimate(weights, loss, [1.0, -1.0, 1.0])
    assert estimates.q_nuclear.value == pytest.approx(4.0, rel=1e-6)
    assert estimates.gradient_bounds == pytest.approx((1.0, 3.0), rel=1e-6)
    # 𝒢 = 2·1 + 2·3 = 8, and not 4 rows of the largest.
    planned = plan("leon", rho=1.0, epsilon=0.5, **{**estimates.at(), "loss_gap": 1.0})
    assert planned.complexity.terms["gradient_bound"] == pytest.approx(160 * math.sqrt(2))


@pytest.mark.parametrize(
    ("loss", "batches", "options", "word"),
    [
        (lambda w, a: a * w.sum(), [1.0], {}, "at least two"),
        (lambda w, a: a * w.sum(), [1.0, math.nan], {}, "finite"),
        (lambda w, a: w.sum() + a, [1.0, math.inf], {}, "the loss must be finite"),
        (lambda w, a: w.sum() + a, [1.0, 2.0], {"lower": 1.6}, "above the mean loss"),
        (lambda w, a: w.sum(), [1.0, 2.0], {"params": torch.zeros(3)}, "2-D"),
    ],
)
def test_estimates_refuse_what_they_cannot_do(loss, batches, options, word):
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    options = {"params": weight, **options}
    with pytest.raises(ValueError, match=word):
        estimate(closure=lambda a: loss(weight, a), batches=batches, **options)


ESTIMATES = Estimates(Interval(3.0, 2.5, 4.0), (1.0,), Interval(2.0, 1.0, 3), ((8, 16),))
TARGET = {"rho": 1.0, "epsilon": 0.5}


def test_estimates_are_arguments_of_a_plan_at_each_end():
    low, value, high = (plan("leon", **TARGET, **ESTIMATES.at(e)) for e in ("low", "value", "high"))
    # 4000·‖Q‖_*²·ΔL/ε³ at the ends; G is the largest seen, at the upper end twice that.
    assert (low.rounds, value.rounds, high.rounds) == (200_000, 576_000, 1_536_000)
    stated = {"q_nuclear": 4.0, "loss_gap": 3.0, "gradient_bound": MARGIN * 1.0}
    assert high == plan("leon", **TARGET, shapes=[(8, 16)], **stated)


def test_lower_ends_below_zero_are_taken_for_what_they_can_be():
    wide = Estimates(Interval(3.0, -1.0, 7.0), (1.0,), Interval(2.0, -1.0, 5), ((8, 16),))
    assert plan("leon", **TARGET, **wide.at("low")).kind == "trivial"
    assert plan("leon", **TARGET, **wide.at()).kind == "reachable"


def test_an_interval_of_a_mean():
    interval = Interval.of_mean(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    error = np.std([1, 2, 3, 6], ddof=1) / 2
    assert (interval.value, interval.low) == pytest.approx((3.0, 3.0 - 3 * error))
    assert Interval.of_mean(torch.tensor([1.0])).high == math.inf


# ---------------------------------------------------------------------- the command


def command(*flags, **changes):
    app = typer.Typer()
    app.command()(verb)
    options = {"optimizer": "leon", "rho": 1, "epsilon": 0.5, "q_nuclear": 3, "delta": 2}
    options |= {"gradient_bound": 1, "shape": "8x16", **changes}
    pairs = [(f"--{k.replace('_', '-')}", str(v)) for k, v in options.items() if v is not None]
    return CliRunner().invoke(app, [*itertools.chain(*pairs), *flags])


def test_the_command_prints_the_plan():
    result = command()
    assert result.exit_code == 0
    for word in ("0.9999305556", "576000", "reachable"):
        assert word in result.output
    result = command("--json", optimizer="pion")
    printed = json.loads(result.output)
    expected = theory.pion_complexity(
        rho=1.0, epsilon=0.5, q_nuclear=3.0, loss_gap=2.0, gradient_bound=1.0, rows=8, width=16
    )
    assert printed["complexity"]["rounds"] == expected.rounds
    assert printed["bound"]["total"] <= 0.5
    assert result.exit_code == 0
    several = json.loads(command("--json", "--shape", "4x1").output)["complexity"]["terms"]
    assert several["gradient_bound"] == pytest.approx(10 * math.sqrt(2) * 9 / 0.5)


def test_the_command_names_what_is_wrong_missing_trivial_and_out_of_reach():
    for epsilon, kind in ((4, "trivial"), (1e-200, "out of reach")):
        result = command("--json", epsilon=epsilon)
        assert result.exit_code == 1 and json.loads(result.output)["kind"] == kind
    assert command(epsilon=4).exit_code == 1
    for changes, words in (
        ({"shape": "8by16"}, ["--shape"]),
        ({"rho": -1}, ["rho"]),
        ({"epsilon": 0}, ["epsilon"]),
        ({"delta": None}, ["--delta"]),
    ):
        result = command(**changes)
        assert result.exit_code == 2 and all(word in result.stderr for word in words)
