"""A warm step goes straight through the house, and sees every option that was changed before it."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import nucleon
from nucleon.optim import options

HOUSE = str(Path(nucleon.__file__).parent)


def calls_of(function):
    """The code of each Python call inside nucleon, in order, but that of comprehensions."""
    calls = []

    def look(frame, event, _):
        name = frame.f_code.co_filename
        own = name.startswith(HOUSE) and not frame.f_code.co_name.startswith("<")
        if event == "call" and own:
            calls.append(frame.f_code)

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def lines_of(code):
    """Return the number of lines of a function, its docstring included."""
    return max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1


@pytest.mark.parametrize(
    ("make", "calls", "files", "changes"),
    [(nucleon.Muon, 61, 11, 25), (nucleon.Leon, 71, 11, 31), (nucleon.Pion, 96, 15, 35)],
)
def test_a_warm_step_is_few_calls_through_few_files(make, calls, files, changes):
    """Every limit is what the step needs."""
    param = torch.zeros(64, 128, requires_grad=True)
    optimizer = make([param])
    for _ in range(3):
        param.grad = torch.randn(64, 128)
        found = calls_of(optimizer.step)
    places = [code.co_filename for code in found]
    assert len(found) <= calls
    assert len(set(places)) <= files
    assert sum(a != b for a, b in pairwise(places)) <= changes
    assert {code.co_name: lines_of(code) for code in found if lines_of(code) > 60} == {}


class Damped(nucleon.Leon):
    """Whose smoothing depends on an option of its own."""

    own_options = {**nucleon.Leon.own_options, "damping": 1.0}  # noqa: RUF012

    def smoothing_scale(self, group, m, n):
        return group["damping"]


CHANGES = {
    "momentum": 0.5,
    "beta2": 0.3,
    "nesterov": True,
    "smoothing_scale": 4.0,
    "gradient_bound": 2.0,
    "scale": "match-adamw",
    "maximize": True,
    "weight_decay": 0.5,
    "lr": 0.3,
    "step_length": "exponential",
    "method": "newton-schulz",
    "iterations": 3,
    "stochastic_rounding": True,
}
OF_MUON = {"coefficients": [(1.5, -0.5, 0.0)]}
OF_PION = {"samples": 3, "seed": 5}
OF_ADAMW = {"betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 0.5, "lr": 0.3, "maximize": True}
UNSEEN = {
    *("route", "axes", "certify"),  # facts of a group from its first step on
    *("placement", "wire_dtype"),  # of several ranks: tests/distributed
    *("nonfinite", "largest_stack"),  # finite gradients of one matrix do not show them
    "momentum_dtype",  # the test after the next
}


def test_every_option_is_changed_below_or_is_not_seen_in_one_process():
    param = torch.zeros(4, 6, requires_grad=True)
    groups = [make([param]).param_groups[0] for make in (nucleon.Muon, nucleon.Pion, nucleon.Leon)]
    groups += nucleon.Leon([{"params": [param], "route": "adamw"}]).param_groups
    known = {*options.ADAMW_DEFAULTS, *options.OWN_OPTIONS, *options.SHARED, "momentum"}
    found = {name for group in groups for name in group} & known
    assert found - UNSEEN == {*CHANGES, *OF_MUON, *OF_PION, *OF_ADAMW}


@pytest.mark.parametrize(
    ("make", "given", "option", "value"),
    [
        *((nucleon.Leon, {}, *change) for change in CHANGES.items()),
        *((nucleon.Muon, {}, *change) for change in OF_MUON.items()),
        *((nucleon.Pion, {"samples": 2}, *change) for change in OF_PION.items()),
        *((nucleon.Leon, {"route": "adamw"}, *change) for change in OF_ADAMW.items()),
        (Damped, {}, "damping", 4.0),
    ],
)
def test_an_option_that_changes_is_that_of_the_next_step(make, given, option, value):
    """As if it were the first step of another optimizer with that state; without it, another."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if option == "stochastic_rounding" else torch.float32
    starts = torch.randn(3, 4, 6, generator=generator).to(dtype)
    params = [start.clone().requires_grad_() for start in starts]
    gradients = torch.randn(4, 4, 6, generator=generator).to(dtype)
    first, second, third = (make([{"params": [p], **given}], lr=0.1) for p in params)
    for gradient in gradients[:2]:
        params[0].grad = gradient
        first.step()
    for param, optimizer in zip(params[1:], (second, third), strict=True):
        optimizer.load_state_dict(first.state_dict())
        param.data.copy_(params[0])
    for optimizer in (first, second):
        optimizer.param_groups[0][option] = value
    for gradient in gradients[2:]:
        for param, optimizer in zip(params, (first, second, third), strict=True):
            param.grad = gradient
            optimizer.step()
    assert torch.equal(params[0], params[1])
    assert not torch.equal(params[0], params[2])


@pytest.mark.parametrize("to", ["instance", "class", "base"])
def test_a_hook_that_is_assigned_is_that_of_the_next_step(to, monkeypatch):
    """On CUDA it is another engine that steps the matrix: the list of work is made anew."""
    param = torch.zeros(4, 6, requires_grad=True)
    optimizer = type("Late", (nucleon.Leon,), {})([param], lr=0.1)
    for _ in range(2):
        param.grad = torch.randn(4, 6)
        optimizer.step()
    made, before = optimizer._worklist, param.detach().clone()
    target = {"instance": optimizer, "class": type(optimizer), "base": nucleon.Leon}[to]
    monkeypatch.setattr(target, "direction", lambda *given: torch.zeros_like(given[-3]))
    optimizer.step()
    assert optimizer._worklist is not made
    assert torch.equal(param, before)


def test_a_beta2_near_1_may_have_another_engine():
    param = torch.zeros(4, 6, requires_grad=True)
    optimizer = nucleon.Leon([param], lr=0.1)
    lists = []
    for beta2 in (0.9, 0.95, 0.99, 0.999, 0.9):
        optimizer.param_groups[0]["beta2"] = beta2
        param.grad = torch.randn(4, 6)
        optimizer.step()
        lists.append(optimizer._worklist)
    assert [a is b for a, b in pairwise(lists)] == [True, False, True, False]


def test_the_dtype_of_the_momentum_is_taken_when_a_state_is_made_or_loaded():
    param = torch.zeros(4, 6, requires_grad=True)
    optimizer = nucleon.Leon([param])
    kept = []
    for change in (False, True):
        optimizer.param_groups[0]["momentum_dtype"] = torch.bfloat16 if change else None
        param.grad = torch.ones(4, 6)
        optimizer.step()
        kept.append(optimizer.state[param]["total"].dtype)
    optimizer.load_state_dict(optimizer.state_dict())
    kept.append(optimizer.state[param]["total"].dtype)
    assert kept == [torch.float32, torch.float32, torch.bfloat16]
