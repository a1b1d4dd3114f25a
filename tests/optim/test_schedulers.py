"""One rate for all groups would be AdamW's too: it is said once, at the line of the user."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import nucleon


def of_groups(model, lr, **options):
    """As factories make it: groups, and the rate of the matrices in the constructor."""
    return nucleon.Leon(nucleon.optim.param_groups(model, **options), lr=lr)


MAKES = pytest.mark.parametrize("make", [nucleon.Leon.for_model, of_groups])


def run(schedule, steps=12, make=nucleon.Leon.for_model, **options):
    """The warnings of a run under a scheduler that speak of AdamW."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    optimizer = make(model, **{"lr": 0.02, "aux_lr": 3e-4, "head": None} | options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        scheduler = schedule(optimizer)
        for _ in range(steps):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return [each for each in said if "AdamW" in str(each.message)]


ONE_RATE = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=20),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 0.02, 4, cycle_momentum=False),
    "by hand": lambda o: lr_scheduler.LambdaLR(o, [lambda _: 1.0, lambda _: 0.02 / 3e-4]),
}


@MAKES
@pytest.mark.parametrize("name", ONE_RATE)
def test_one_rate_for_all_is_said_once_where_the_step_is_taken(name, make):
    (said,) = run(ONE_RATE[name], make=make)
    assert "they began with 0.0003 beside 0.02" in str(said.message)
    assert said.filename == __file__


RIGHT = {
    "a list": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=[g["lr"] for g in o.param_groups], total_steps=20
    ),
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


@pytest.mark.parametrize(
    "options", [{"scale": "match-adamw"}, {"aux_lr": 0.02}, {"overrides": {"1.*": {"lr": 0.02}}}]
)
def test_one_rate_serves_where_it_is_meant_to(options):
    schedule = RIGHT["exponential" if "overrides" in options else "a list"]
    assert not run(schedule, **options)
    if "scale" in options:
        assert not run(ONE_RATE["OneCycleLR"], **options)
