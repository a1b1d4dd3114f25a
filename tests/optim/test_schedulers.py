"""One rate for all groups would be AdamW's too: it is said once, with the list to pass."""

import math
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import nucleon


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))


def of_groups(model, lr, **options):
    """As factories make it: groups, and the rate of the matrices in the constructor."""
    return nucleon.Leon(nucleon.optim.param_groups(model, **options), lr=lr)


def run(schedule, steps=12, make=nucleon.Leon.for_model, **options):
    """What is said over a run under a scheduler."""
    model = network()
    optimizer = make(model, **{"lr": 0.02, "aux_lr": 3e-4, "head": None} | options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scheduler = schedule(optimizer)
        for _ in range(steps):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return [str(each.message) for each in said if "AdamW" in str(each.message)]


ONE_RATE = {
    "OneCycleLR": (
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=20),
        "max_lr=[0.02, 0.0003]",
    ),
    "SWALR": (lambda o: SWALR(o, swa_lr=0.01), "swa_lr=[0.01, 0.00015]"),
    "CyclicLR": (
        lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, step_size_up=4, cycle_momentum=False),
        "as CyclicLR takes base_lr and max_lr, here [0.001, 1.5e-05]",
    ),
    "by hand": (
        lambda o: lr_scheduler.LambdaLR(o, [lambda _: 1.0, lambda _: 0.02 / 3e-4]),
        "here [0.02, 0.0003]",
    ),
}


MAKES = pytest.mark.parametrize("make", [nucleon.Leon.for_model, of_groups])


@MAKES
@pytest.mark.parametrize("name", ONE_RATE)
def test_one_rate_for_all_is_said_once_with_the_list(name, make):
    schedule, wanted = ONE_RATE[name]
    (said,) = run(schedule, make=make)
    assert wanted in said and "began with 0.0003 beside 0.02" in said


def test_the_list_keeps_the_ratios_of_rates_that_overrides_gave():
    overrides = {"1.weight": {"lr": 1e-3}, "2.weight": {"lr": 5e-3}}
    (said,) = run(ONE_RATE["OneCycleLR"][0], overrides=overrides)
    (listed,) = re.findall(r"max_lr=\[(.*?)\]", said)
    rates = [float(rate) for rate in listed.split(", ")]
    assert sorted(rates) == pytest.approx([3e-4, 1e-3, 5e-3, 2e-2])


def test_an_override_that_gives_adamw_the_rate_of_the_matrices_is_as_it_was_meant():
    overrides = {"1.weight": {"lr": 0.02}}
    assert not run(RIGHT["exponential"], overrides=overrides)


FLOORS = {
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, 20, eta_min=1e-3
    ),
    "after a warm-up": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 20, 1e-3)],
        [4],
    ),
}
MULTIPLIES = r"LambdaLR\(optimizer, (lambda .*?)\), where"


@MAKES
@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_above_the_rate_of_adamw_is_said_once_with_what_to_pass(name, make):
    (said,) = run(FLOORS[name], make=make)
    assert "pass eta_min=0.0003 or less" in said
    (written,) = re.findall(MULTIPLIES, said)
    factor = eval(written, {"low": 0.05, "math": math, "STEPS": 20})
    assert not run(lambda o: lr_scheduler.LambdaLR(o, factor))
    # The cosine of CosineAnnealingLR, from the first rate to `low` of it.
    wanted = [0.05 + 0.95 * (1 + math.cos(math.pi * t / 20)) / 2 for t in range(21)]
    assert [factor(t) for t in range(21)] == pytest.approx(wanted, abs=1e-15)


def test_a_floor_that_lifts_the_rate_of_the_matrices_is_said_too():
    (said,) = run(FLOORS["CosineAnnealingLR"], lr=3e-4, aux_lr=0.02)
    assert "lifts the matrices' rate" in said and "eta_min=0.0003" in said


def apart(optimizer):
    """A schedule for each group: the matrices down, AdamW up."""
    return lr_scheduler.LambdaLR(optimizer, [lambda t: 1 - 0.04 * t, lambda t: 1 + 0.04 * t])


def test_a_schedule_for_each_group_is_told_what_is_seen_and_of_what_may_be():
    (said,) = run(apart)
    seen = "lifts AdamW's rate, 0.0003 → 0.000312, while the matrices' falls, 0.02 → 0.0192."
    assert seen in said
    assert "If it was told one rate for all groups" in said
    assert "a schedule of its own, all is as you wrote it" in said


def test_rates_that_part_are_no_floor():
    assert not run(apart, lr=3e-4, aux_lr=0.02)


def test_a_floor_is_seen_beside_a_group_that_falls_from_below():
    """Of any two groups, not of the first that fall and rise."""
    overrides = {"2.weight": {"lr": 1e-4}}

    def schedule(optimizer):
        optimizer.param_groups.sort(key=lambda group: group["lr"])
        slopes = [0.04 if g["route"] == "adamw" else -0.04 for g in optimizer.param_groups]
        return lr_scheduler.LambdaLR(optimizer, [lambda t, s=s: 1 + s * t for s in slopes])

    (said,) = run(schedule, overrides=overrides)
    assert "0.02 → 0.0192" in said


def test_a_plateau_lifts_no_rate_below_its_least():
    """The least rate of AdamW's group is its own: `min_lr` as a number leaves it where it is."""
    optimizer = nucleon.Leon.for_model(network(), lr=0.02, aux_lr=3e-4, head=None)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=1e-3)
    for _ in range(5):
        scheduler.step(1.0)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 3e-4]


RIGHT = {
    "lists for CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, [0.001, 1.5e-5], [0.02, 3e-4], step_size_up=4, cycle_momentum=False
    ),
    "a list": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[g["lr"] for g in o.param_groups], total_steps=20
    ),
    "a list for SWA": lambda o: SWALR(o, swa_lr=[0.01, 1e-4]),
    "warm-up from zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 10),
    "cosine to a small rate": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=1e-5),
    "cosine to AdamW's rate": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=3e-4),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "one that grows": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 + step),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
}


@MAKES
@pytest.mark.parametrize("name", RIGHT)
def test_schedules_that_keep_the_rates_apart_are_not_blamed(name, make):
    assert not run(RIGHT[name], make=make)


def test_one_rate_serves_where_it_is_meant_to():
    schedule = ONE_RATE["OneCycleLR"][0]
    assert not run(schedule, scale="match-adamw")
    assert not run(schedule, aux_lr=0.02)
