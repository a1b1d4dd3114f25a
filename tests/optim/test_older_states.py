"""State dicts that version 2 wrote load, and go on to the weights that version 2 went on to.

The files are real ones, see `older_states`.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from older_states import (
    AFTER,
    BEFORE,
    CASES,
    FOLDER,
    PROCESSES,
    go,
    model,
    optimizer,
    process,
    walk,
)
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from helpers_states import differences
from nucleon.linalg import augmented

LATER = {"consistency_every": 0}  # None was never, which is 0


@pytest.fixture(autouse=True)
def _without_a_floor(monkeypatch):
    """Version 2 had no floor on the Gram matrix of Leon's recursion; all else has its bits."""
    monkeypatch.setattr(augmented, "GRAM_FLOOR", 0.0)


def saved(case):
    return torch.load(FOLDER / f"{case}.pt", weights_only=True)


def resumed(case, found):
    net = model(case)
    net.load_state_dict(found["start"])
    method = optimizer(case, net, **LATER)
    method.load_state_dict(found["optimizer"])
    return method, go(net, method, BEFORE, BEFORE + AFTER)


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_bit_for_bit(case):
    found = saved(case)
    assert {g["nucleon"][-2:] for g in found["optimizer"]["param_groups"]} == {"/2"}
    method, end = resumed(case, found)
    assert not differences(end, found["end"])
    if case == "leon_certified":
        certificates = method.certificates()
        assert len(certificates) == 4
        assert all(c.refusal is None and c.holds for c in certificates.values())


def test_what_is_saved_again_is_of_this_version_and_loads():
    found = saved("leon")
    method, _ = resumed("leon", found)
    again = method.state_dict()
    assert not {"axes", "param_names", "reasons", "cautious"} & set(again["param_groups"][0])
    optimizer("leon", model("leon"), **LATER).load_state_dict(again)


def test_a_gradient_above_its_bound_is_not_forgotten():
    """Version 2 kept the largest norm alone: every gradient may have had it, in all directions."""
    bounds = []
    for largest in (20.0, 20.5):
        found = saved("leon_certified")
        group = found["optimizer"]["param_groups"][0]
        key = group["params"][group["param_names"].index("up.weight")]  # (6, 4)
        found["optimizer"]["state"][key]["largest"].fill_(largest)
        certificate = resumed("leon_certified", found)[0].certificates()["up.weight"]
        assert certificate.refusal is None
        bounds.append(certificate.bound)
    above = sum(4 * 0.5 * 0.95 ** (AFTER + age) for age in range(BEFORE))
    assert (bounds[1] - bounds[0] >= 2 * above).all()


@pytest.mark.parametrize("note", ["{", "[0.95, nul", "7", '{"momentum": 0.95}', 7])
def test_a_damaged_note_is_refused_by_name_and_nothing_changes(note):
    found = saved("leon_certified")
    found["optimizer"]["param_groups"][0]["certified"] = (note, ())
    net = model("leon_certified")
    method = optimizer("leon_certified", net, **LATER)
    go(net, method, 0, 1)
    before = copy.deepcopy(method.state_dict())
    with pytest.raises(ValueError, match=r"state_dict holds certified=.*load an earlier one"):
        method.load_state_dict(found["optimizer"])
    assert not differences(method.state_dict(), before)


def test_names_that_a_wrapper_has_changed_match_those_of_the_model():
    """Version 2 left frozen parameters out, so that the others are matched by name."""
    found = saved("leon")
    for group in found["optimizer"]["param_groups"]:
        assert "frozen.weight" not in group["param_names"]
        group["param_names"] = [f"module._orig_mod.{name}" for name in group["param_names"]]
    assert not differences(resumed("leon", found)[1], found["end"])


def test_axes_of_a_state_that_lacks_frozen_parameters_are_compared():
    found = saved("leon")
    group = found["optimizer"]["param_groups"][0]
    assert "frozen.weight" not in group["param_names"]
    group["axes"][group["param_names"].index("up.weight")] = "c r"
    with pytest.raises(ValueError, match="saved with axes='c r' for parameter up"):
        resumed("leon", found)


def test_a_placement_that_is_gone_is_that_of_the_optimizer_at_hand():
    found = saved("leon")
    for group in found["optimizer"]["param_groups"]:
        group["placement"] = "gram"
    method, end = resumed("leon", found)
    assert not differences(end, found["end"])
    assert {group["placement"] for group in method.param_groups} == {"local"}


@pytest.mark.parametrize(("case", "option"), [("muon", "cautious")])
def test_an_option_that_is_gone_is_told(case, option):
    found = saved(case)
    found["optimizer"]["param_groups"][0][option] = True
    with pytest.warns(UserWarning, match=f"{option}=True, which is no option"):
        resumed(case, found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", ["leon", "muon", "leon_certified"])
def test_a_distributed_checkpoint_loads_in_part(tmp_path, case):
    """What version 2 did not save per parameter stays as the optimizer at hand has it."""
    found, net = saved(case), model(case)
    dcp.save(by_name(found["optimizer"]), checkpoint_id=tmp_path)
    net.load_state_dict(found["start"])
    method = optimizer(case, net, **LATER)
    state = get_optimizer_state_dict(net, method)
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(net, method, state)
    assert not differences(go(net, method, BEFORE, BEFORE + AFTER), found["end"])
    check_certificates_end(method)


@pytest.mark.parametrize("case", CASES)
def test_a_flat_state_goes_on_bit_for_bit(case):
    found, net = saved(case), model(case)
    net.load_state_dict(found["start"])
    method = optimizer(case, net, **LATER)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(net, method, flat(by_name(found["optimizer"])), options=options)
    assert not differences(go(net, method, BEFORE, BEFORE + AFTER), found["end"])
    check_certificates_end(method)


def by_name(state):
    """A state as `get_optimizer_state_dict` returns it."""
    for group in state["param_groups"]:
        for key, name in zip(group["params"], group["param_names"], strict=True):
            state["state"][name] = state["state"].pop(key)
        group["params"] = group["param_names"]
    return state


def flat(state):
    """The same with flatten_optimizer_state_dict=True."""
    entries = {
        f"state.{name}.{entry}": value
        for name, own in state["state"].items()
        for entry, value in own.items()
    }
    return entries | {
        f"param_groups.{name}.{option}": value
        for group in state["param_groups"]
        for name in group["params"]
        for option, value in group.items()
        if option != "params"
    }


def check_certificates_end(method):
    """torch asks for the entries of version 3, so that the largest norm of a gradient is lost."""
    expected = method.uncertified or "the version changed during the run"
    assert all(c.refusal == expected for c in method.certificates().values())


@pytest.mark.parametrize("name", PROCESSES)
def test_a_conversion_goes_on_bit_for_bit(name):
    """Learners of schema 1 kept no ledger: the game goes on, its certificate does not."""
    found = saved("o2nc")[name]
    assert found["optimizer"]["learners"][0]["schema"] == 1
    param, method = process(name)
    with torch.no_grad():
        param.copy_(found["start"])
    method.load_state_dict(found["optimizer"])
    assert torch.equal(walk(param, method, BEFORE, BEFORE + AFTER), found["end"])
    refusal = method.learners[0].certificate(oblivious=True).refusal
    assert name == "FTL" or f"{BEFORE} gradients answered no action or were saved" in refusal
    process(name)[1].load_state_dict(method.state_dict())


@pytest.mark.parametrize("name", ["FAML", "KroneckerFTRL"])
@pytest.mark.parametrize("lost", ["gram", "rounds", "options", "learner", "shape"])
def test_a_damaged_learner_of_schema_1_is_refused(name, lost):
    state = saved("o2nc")[name]["optimizer"]
    del state["learners"][0][lost]
    with pytest.raises(ValueError, match=lost):
        process(name)[1].load_state_dict(state)
