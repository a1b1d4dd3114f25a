"""`param_groups`: what `for_model` decides, for factories that make the optimizer themselves."""

import pytest
import torch
from torch import nn

import nucleon
from nucleon.optim import param_groups

OVERRIDES = {"0.weight": {"lr": 0.5, "momentum": 0.5}, "2.weight": {"axes": "(b=2 r) c"}}


def model():
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def steps(net, optimizer, count=3):
    torch.manual_seed(1)
    for _ in range(count):
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("method", ["Leon", "Muon", "Pion"])
def test_an_optimizer_of_the_groups_takes_the_steps_of_for_model(method):
    told = {"head": "3", "overrides": OVERRIDES, "aux_lr": 0.02, "aux": {"betas": (0.5, 0.9)}}
    make, own = getattr(nucleon, method), {"weight_decay": 0.1, "momentum": 0.9}
    one, other = model(), model()
    whole = make.for_model(one, lr=0.1, **told, **own)
    # As timm's create_optimizer_v2 calls what it is given: groups, then its own options.
    apart = make(param_groups(other, **told), lr=0.1, **own)
    for x, y in zip(steps(one, whole), steps(other, apart), strict=True):
        assert torch.equal(x, y)
    assert str(apart.explain()) == str(whole.explain())
    rates = [(g["route"], g["lr"], g["momentum"], g["weight_decay"]) for g in apart.param_groups]
    assert rates == [("matrix", 0.5, 0.5, 0.1), ("matrix", 0.1, 0.9, 0.1), ("adamw", 0.02, 0.9, 0)]


def test_groups_are_all_that_is_made_and_what_is_not_known_is_refused():
    net = model()
    groups = param_groups(net, lr=0.3, head="3", overrides={"2.weight": {"lr": 0.3, "samples": 2}})
    assert [g["lr"] for g in groups] == [0.3, 0.3, 1e-3]
    params = [param for group in groups for _, param in group["params"]]
    assert sorted(map(id, params)) == sorted(map(id, net.parameters()))
    for match, call in (
        (r"'momentums'.*did you mean 'momentum'", {"overrides": {"0.weight": {"momentums": 0.5}}}),
        ("its lr is aux_lr", {"aux": {"lr": 0.5}}),
    ):
        with pytest.raises(TypeError, match=match):
            param_groups(net, **call)
    with pytest.raises(TypeError, match="leon has no option 'samples'"):
        nucleon.Leon(groups)
