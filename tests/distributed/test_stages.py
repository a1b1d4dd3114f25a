"""A state is saved by parameter: it can be cut into pipeline stages, joined, and renamed."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stages import FLAT, LAYERS, Stage, flat, go, make
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CUTS = ((0, 2), (2, LAYERS))


def check_same(found, expected):
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def loaded(folder, method, weights, cut=(0, LAYERS), **options):
    """A stage with its part of a checkpoint of any cut."""
    model = Stage(*cut)
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    optimizer = make(method, model, **options)
    state = copy.deepcopy(flat(model, optimizer))  # dcp writes into what it is given
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state, options=FLAT)
    return model, optimizer


@pytest.mark.parametrize("method", ["muon", "leon", "pion"])
@pytest.mark.parametrize("certify", [False, True])
def test_a_whole_model_goes_on_in_two_stages_and_they_in_a_whole_one(tmp_path, method, certify):
    options = {"certify": certify}
    if method != "muon":
        options["gradient_bound"] = 20.0 * certify
    whole = Stage()
    optimizer = make(method, whole, **options)
    weights = go(whole, optimizer, 0, 2)
    dcp.save(flat(whole, optimizer), checkpoint_id=tmp_path / "whole")
    middle = go(whole, optimizer, 2, 4)

    joined, parts = {}, {}
    for cut in CUTS:
        stage, own = loaded(tmp_path / "whole", method, weights, cut, **options)
        found = go(stage, own, 2, 4)
        check_same(found, middle)
        parts |= found
        joined |= flat(stage, own)
    assert parts.keys() == middle.keys()
    assert joined.keys() == flat(whole, optimizer).keys()

    dcp.save(joined, checkpoint_id=tmp_path / "stages")
    again, resumed = loaded(tmp_path / "stages", method, parts, **options)
    check_same(go(again, resumed, 4, 6), go(whole, optimizer, 4, 6))
    assert resumed.certificates().keys() == optimizer.certificates().keys()
    for name, certificate in optimizer.certificates().items():
        assert str(resumed.certificates()[name]) == str(certificate)


@pytest.mark.parametrize(("method", "placement"), [("leon", "owner"), ("muon", "local")])
def test_wrappers_may_come_and_go_between_save_and_load(ranks2, method, placement):
    kinds = ("plain", "activation checkpointing", "compiled layers", "compiled", "ddp")
    model = Stage()
    optimizer = make(method, model)
    expected = go(model, optimizer, 0, 4)
    names = [optimizer.infos[p].name for g in optimizer.param_groups for p in g["params"]]
    assert set(names) == set(expected)
    arguments = {"method": method, "kinds": kinds, "placement": placement}
    for results in ranks2("rewrapped", **arguments):
        assert len(results) == len(kinds)
        for found, weights in results:
            assert found == names
            check_same(weights, expected)
