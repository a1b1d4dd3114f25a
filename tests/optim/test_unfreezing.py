"""Frozen parameters train once they are unfrozen, as if they always had."""

import copy
import io
import re

import pytest
import torch
from torch import nn

import nucleon


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


class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.known = nn.Linear(4, 4)


def test_nothing_about_what_is_frozen_raises():
    model = Strange()
    optimizer = nucleon.Leon.for_model(model, overrides={"kernel": {"axes": "r c c"}})
    assert optimizer.explain()["kernel"].route == "adamw"
    assert nucleon.Leon.for_model(model).explain()["kernel"].reason.startswith("not known in")
    model.kernel.requires_grad_(True)
    with pytest.raises(ValueError, match="not known here"):
        nucleon.Leon.for_model(model)


# ------------------------------------------------------------------- states without the frozen


def without_frozen(optimizer, *, names=True):
    """The state of an optimizer that was made of the parameters that train, and no others."""
    saved = optimizer.state_dict()
    kept = []
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        trained = [p.requires_grad for p in own["params"]]
        group["params"] = [key for key, keep in zip(group["params"], trained, strict=True) if keep]
        written = group.pop("param_names")
        if names:
            pairs = zip(written, trained, strict=True)
            group["param_names"] = [name for name, keep in pairs if keep]
        kept += [group] if group["params"] else []
    return {**saved, "param_groups": kept}


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("all_of_a_route", [False, True])
def test_a_state_without_frozen_parameters_goes_on_bit_for_bit(all_of_a_route, names):
    model = network()
    if all_of_a_route:
        for p in (model[3].bias, model[4].bias):
            p.requires_grad_(False)
    optimizer = nucleon.Leon.for_model(model, lr=0.1, head=None)
    train(model, optimizer, 3)
    saved = without_frozen(optimizer, names=names)
    assert len(saved["param_groups"]) == (1 if all_of_a_route else 2)
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    twin = copy.deepcopy(model)
    resumed = nucleon.Leon.for_model(twin, lr=0.7, head=None)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert resumed.param_groups[0]["lr"] == 0.1
    for net, method in ((model, optimizer), (twin, resumed)):
        net.requires_grad_(True)
        train(net, method, 3, seed=1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_put_back_and_what_is_added_then_draw_noise_of_their_own():
    params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(5)]
    optimizer = nucleon.Pion([{"params": [p]} for p in params[:4]])
    del optimizer.param_groups[0], optimizer.state[params[0]]
    for param in (params[0], params[4]):
        optimizer.add_param_group({"params": [param]})
    assert [optimizer.infos[param].name for param in params] == ["4", "1", "2", "3", "5"]
    assert [optimizer.state[param]["stream"].item() >> 20 for param in params] == [4, 1, 2, 3, 5]


def test_what_is_added_after_a_load_draws_noise_of_its_own():
    a, b, c, d = (nn.Parameter(torch.randn(3, 8)) for _ in range(4))

    def make(*params):
        optimizer = nucleon.Pion([params[0]])
        for param in params[1:]:
            optimizer.add_param_group({"params": [param]})
        return optimizer

    saved = make(a, b, c)
    del saved.state[saved.param_groups.pop(1)["params"][0]]  # c keeps the number after b's
    loaded = make(a, c)
    loaded.load_state_dict(saved.state_dict())
    loaded.add_param_group({"params": [d]})  # the number after that of the second group
    streams = {int(loaded.state[param]["stream"][0]) for param in (a, c, d)}
    assert len(streams) == 3


def test_a_state_of_others_frozen_says_what_to_do():
    model = network()
    optimizer = nucleon.Leon.for_model(model, head=None)
    train(model, optimizer, 1)
    saved = without_frozen(optimizer, names=False)
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="parameters that were frozen when it was saved"):
        nucleon.Leon.for_model(model, head=None).load_state_dict(saved)


@pytest.mark.parametrize("wrapped", ["", "module.", "module._orig_mod."])
def test_a_state_of_others_frozen_loads_by_its_names(wrapped):
    model = network()
    optimizer = nucleon.Leon.for_model(model, head=None)
    train(model, optimizer, 1)
    saved = without_frozen(optimizer)
    for group in saved["param_groups"]:
        group["param_names"] = [wrapped + name for name in group["param_names"]]
    model.requires_grad_(True)  # all of it: the order says nothing of what was frozen
    resumed = nucleon.Leon.for_model(model, head=None)
    resumed.load_state_dict(saved)
    for p, state in optimizer.state.items():
        assert all(torch.equal(state[key], resumed.state[p][key]) for key in state)
    assert resumed.state[model[1].weight]["total"].eq(0).all()


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


def test_the_groups_of_a_module_are_added_as_for_model_routes_them():
    model = network(frozen=False)
    optimizer = nucleon.Leon.for_model(model, lr=0.1, aux_lr=0.01, head=None)
    model.append(nn.ModuleDict({"later": nn.Linear(3, 5), "norm": nn.LayerNorm(5)}).double())
    for group in nucleon.optim.param_groups(model[5], head=None, aux_lr=0.02):
        optimizer.add_param_group(group)
    rows = {row.name: row for row in optimizer.explain()}
    assert rows["later.weight"].route == "matrix" and rows["norm.weight"].route == "adamw"
    assert [g["lr"] for g in optimizer.param_groups[-2:]] == [0.1, 0.02]


def test_a_group_without_a_route_is_refused_as_the_error_says():
    optimizer = nucleon.Leon.for_model(network(), head="4")
    extra = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="needs a route") as refusal:
        optimizer.add_param_group({"params": [extra]})
    with pytest.raises(TypeError, match=r"nucleon.optim.param_groups\(module\)"):
        optimizer.add_param_group(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r'pass these with names, as in \[\("extra.weight", p\)\]'):
        optimizer.add_param_group({"params": [extra], "route": "adamw"})
    assert len(optimizer.param_groups) == 2
    said = re.search(r"as in ({.*}), or", str(refusal.value))
    optimizer.add_param_group(eval(said[1], {"parameter": extra}))
    assert optimizer.explain()["extra.weight"].route == "adamw"
