"""Frozen parameters train once they are unfrozen, as if they always had."""

import re

import pytest
import torch
from torch import nn

import nucleon
from optim.modules import named, parameter


def network(frozen=True):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
    ).double()
    model[:3].requires_grad_(not frozen)
    return model


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(7, (5,), generator=generator)
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", [nucleon.Leon, nucleon.Muon])  # Pion's noise is by number
def test_what_is_unfrozen_takes_the_steps_of_a_group_added_then(method):
    """The oracle: an optimizer of the trained half, to which the other is added when unfrozen."""
    model, twin = network(), network()
    whole = method.for_model(model, lr=0.1, head=None)
    half = method.for_model(twin[3:], lr=0.1, head=None)
    train(model, whole, 3)
    train(twin, half, 3)
    assert model[1].weight not in whole.state
    model.requires_grad_(True)
    twin.requires_grad_(True)
    half.add_param_group({"params": [("1.weight", twin[1].weight)], "route": "matrix", "lr": 0.1})
    rest = [(n, p) for n, p in twin[:3].named_parameters() if p is not twin[1].weight]
    half.add_param_group({"params": rest, "route": "adamw", "lr": 1e-3})
    train(model, whole, 3, seed=1)
    train(twin, half, 3, seed=1)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        # Float64 products of numbers near 1 in two orders of stacking.
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9, msg=name)
    assert whole.state[model[1].weight]["total"].abs().max() > 0
    assert "frozen" not in str(whole.explain())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=["int8", "uint8", "float8"]
)
def test_quantized_weights_are_left_out(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)
    optimizer = nucleon.Leon.for_model(model)
    assert model[0].weight not in optimizer.infos
    row = optimizer.explain()["0.weight"]
    assert row.route == "frozen" and "quantized" in row.reason


def test_nothing_about_what_is_frozen_raises():
    model = named("Strange", kernel=parameter(3, 4).requires_grad_(False), known=nn.Linear(4, 4))
    optimizer = nucleon.Leon.for_model(model, overrides={"kernel": {"axes": "r c c"}})
    assert optimizer.explain()["kernel"].route == "adamw"
    assert nucleon.Leon.for_model(model).explain()["kernel"].reason.startswith("not known in")
    model.kernel.requires_grad_(True)
    with pytest.raises(ValueError, match="not known here"):
        nucleon.Leon.for_model(model)


# ------------------------------------------------------------------- states without the frozen


def test_loading_makes_no_state_of_what_is_frozen():
    model = network()
    optimizer = nucleon.Leon.for_model(model)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    resumed = nucleon.Leon.for_model(model)
    resumed.load_state_dict(saved)
    assert model[1].weight not in resumed.state
    unfrozen = network(frozen=False)
    later = nucleon.Leon.for_model(unfrozen)
    later.load_state_dict(saved)  # gradual unfreezing resumes with whatever is frozen then
    assert later.state[unfrozen[1].weight]["total"].eq(0).all()
    assert later.state[unfrozen[3].weight]["total"].abs().max() > 0


# ------------------------------------------------------------------------------ added later


def test_a_group_without_a_route_is_refused_as_the_error_says():
    optimizer = nucleon.Leon.for_model(network(), head="4")
    extra = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="needs a route") as refusal:
        optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match="cannot add param group without names"):
        optimizer.add_param_group({"params": [extra], "route": "adamw"})
    assert len(optimizer.param_groups) == 2
    said = re.search(r"as in ({.*}), or", str(refusal.value))
    optimizer.add_param_group(eval(said[1], {"parameter": extra}))
    assert optimizer.explain()["extra.weight"].route == "adamw"
