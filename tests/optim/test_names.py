"""Names of parameters in a state: written as torch writes them, and matched when it is loaded."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import nucleon


def weights(*names, shape=(3, 4)):
    return [(name, nn.Parameter(torch.zeros(shape))) for name in names]


def trained(params, **options):
    """An optimizer after two steps; the gradients of a parameter are told by its name."""
    optimizer = nucleon.Leon(params, **options)
    for step in range(2):
        for p, info in optimizer.infos.items():
            noise = torch.Generator().manual_seed(100 * step + sum(info.name.encode()))
            p.grad = torch.randn(p.shape, generator=noise)
        optimizer.step()
    return optimizer


def totals(optimizer):
    return {optimizer.infos[p].name: state["total"] for p, state in optimizer.state.items()}


def loaded(saved, params, **options):
    optimizer = nucleon.Leon(params, **options)
    optimizer.load_state_dict(saved)
    return optimizer


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", [nucleon.Leon, torch.optim.AdamW])
def test_names_are_in_the_groups_as_torch_writes_them(make):
    """Run for torch's AdamW too, whose names these are."""
    a, b, c = weights("a", "module.b", "c")
    optimizer = make([a, b])
    optimizer.add_param_group({"params": [c]})
    for groups in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        assert [group["param_names"] for group in groups] == [["a", "module.b"], ["c"]]
    plain = make([a[1], b[1]])
    assert all(
        "param_names" not in g for g in (*plain.param_groups, *plain.state_dict()["param_groups"])
    )
    with pytest.raises(ValueError, match=r"with.*names"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})


def test_groups_of_another_optimizer_keep_their_names():
    old = torch.optim.SGD(weights("a", "b"))
    assert nucleon.Leon(old.param_groups).param_groups[0]["param_names"] == ["a", "b"]


def test_a_parameter_given_twice_is_taken_once_with_the_warning_of_torch():
    """`[layer.weight for layer in tied]`: torch warns, and steps it twice."""
    ((_, a), (_, b)) = weights("a", "b")
    for params in ([a, b, a], [("a", a), ("b", b), ("c", a)]):
        for make in (torch.optim.SGD, nucleon.Leon):
            with pytest.warns(UserWarning, match="parameter group with duplicate parameters"):
                optimizer = make(params)
        assert optimizer.param_groups[0]["params"] == [a, b]
        assert [info.name for info in optimizer.infos.values()][-1] in ("b", "1")


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_another_order_of_the_same_names_is_matched_by_name(wrapper):
    optimizer = trained(weights("q", "k", "v"))
    saved = optimizer.state_dict()
    other = loaded(saved, weights(*(wrapper + name for name in ("v", "q", "k"))))
    assert_same(totals(other), totals(optimizer))
    assert other.param_groups[0]["param_names"] == [wrapper + name for name in ("v", "q", "k")]
    again = loaded(other.state_dict(), weights("q", "k", "v"))
    assert_same(totals(again), totals(optimizer))


def test_another_order_of_groups_is_matched_with_their_options():
    groups = [{"params": weights("a", "b"), "lr": 0.1}, {"params": weights("c", "d"), "lr": 0.3}]
    optimizer = trained(groups)
    swapped = [{"params": weights("d", "c")}, {"params": weights("b", "a")}]
    other = loaded(optimizer.state_dict(), swapped)
    assert_same(totals(other), totals(optimizer))
    assert [group["lr"] for group in other.param_groups] == [0.3, 0.1]


def test_groups_that_divide_the_names_otherwise_are_refused():
    saved = trained([{"params": weights("a", "b")}, {"params": weights("c", "d")}]).state_dict()
    optimizer = nucleon.Leon([{"params": weights("a", "c")}, {"params": weights("b", "d")}])
    with pytest.raises(ValueError, match=r"has a, c in several groups"):
        optimizer.load_state_dict(saved)
    assert all(total.eq(0).all() for total in totals(optimizer).values())


@pytest.mark.parametrize("flat", [True, False])
def test_states_that_torch_has_sorted_by_name_are_not_sorted_again(flat):
    """`get_optimizer_state_dict` keys by name, and leaves the list of names as it was."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    models = [nn.ParameterDict(weights(*names)) for names in ("qkv", "vqk")]
    first, second = (trained(list(model.named_parameters())) for model in models)
    expected = {name: total.clone() for name, total in totals(first).items()}
    for total in totals(second).values():
        total.zero_()
    state = get_optimizer_state_dict(models[0], first, options=options)
    set_optimizer_state_dict(models[1], second, state, options=options)
    assert_same(totals(second), expected)
    assert second.param_groups[0]["param_names"] == ["v", "q", "k"]


@pytest.mark.parametrize(
    ("saved", "loading"),
    [("ab", ("x.a", "x.b")), ("ab", ("a", "x")), ("ab", None), (None, "ba")],
)
def test_other_names_or_none_load_by_position_as_torch_does(saved, loading):
    def given(names):
        return weights(*names) if names else [p for _, p in weights("a", "b")]

    optimizer = trained(given(saved))
    other = loaded(optimizer.state_dict(), given(loading))
    found, expected = ([*totals(each).values()] for each in (other, optimizer))
    assert all(map(torch.equal, found, expected))
    if saved is None:
        assert other.param_groups[0]["param_names"] == [*loading]
