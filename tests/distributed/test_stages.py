"""A state is saved by parameter: it can be cut into pipeline stages, joined, and renamed."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stages import FLAT, LAYERS, METHODS, Stage, flat, go, make
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


@pytest.mark.parametrize("method", METHODS)
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


def options_of(layers, make_optimizer):
    """Of what a flat state holds beside tensors: bytes, entries, parameters, the longest list, and
    the bytes of the largest entry.
    """
    model = Stage(0, layers, layers)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = make_optimizer(model)
    optimizer.step()
    state = flat(model, optimizer)
    rest = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    count = len(list(model.parameters()))
    sizes = [len(pickle.dumps(item)) for item in rest.items()]
    longest = max(len(v) for v in rest.values() if isinstance(v, list | tuple))
    return sum(sizes), len(rest), count, longest, max(sizes)


def without_names(optimizer):
    """As docs/distributed.md says: a flat state repeats the names of a group for each parameter."""
    for group in optimizer.param_groups:
        del group["param_names"]
    return optimizer


def test_a_flat_state_of_many_layers_has_no_lists_that_grow_with_them():
    makers = {
        "leon": lambda model: without_names(make("leon", model)),
        "torch's AdamW": lambda model: torch.optim.AdamW(model.parameters()),
    }
    for name, maker in makers.items():
        sizes = {}
        for layers in (20, 80):
            size, options, count, longest, largest = options_of(layers, maker)
            assert longest == 2  # betas
            assert largest < count, name  # a list of all parameters has a byte for each, or more
            sizes[layers] = size / count
        print(f"{name}, 80 layers: {count} parameters, {options} options, {size / 1e6:.2f} MB")
        names = len("layers.79.") - len("layers.9.")  # the longer of them, in each key
        assert sizes[80] - sizes[20] <= names * options / count
