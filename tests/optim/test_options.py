"""Facts of an option are in its declaration, also for an optimizer of a user."""

import inspect
import re
from typing import Annotated

import pytest
import torch

import nucleon
from nucleon import optim
from nucleon.optim import options


class DampedOptions(nucleon.optim.LeonOptions, total=False):
    """Options of `Damped`."""

    damping: Annotated[float, 0.5]
    verbose: Annotated[bool, False]


class Damped(nucleon.Leon):
    """P of Leon times the damping."""

    own_options = options.added_by(DampedOptions)

    def direction(self, total, smoothing, context):
        return context.options["damping"] * super().direction(total, smoothing, context)


class Plain(nucleon.Leon):
    """An optimizer with the defaults alone, and with another default of a shared option."""

    own_options = {  # noqa: RUF012
        **nucleon.Leon.own_options,
        "damping": 0.5,
        "verbose": False,
        "iterations": 7,
        "momentum": 0.9,
    }

    direction = Damped.direction


def optimizer(make, **given):
    param = torch.zeros(3, 5, requires_grad=True)
    param.grad = torch.ones(3, 5)
    return make([param], **given)


@pytest.mark.parametrize("make", [Damped, Plain])
def test_options_of_ones_own_have_their_defaults(make):
    group = optimizer(make).param_groups[0]
    assert group["damping"] == 0.5 and group["verbose"] is False and group["beta2"] is None
    assert optimizer(make, damping=2.0).param_groups[0]["damping"] == 2.0
    assert group["iterations"] == (7 if make is Plain else 5)
    assert group["momentum"] == (0.9 if make is Plain else 0.95)


@pytest.mark.parametrize("make", [Damped, Plain])
def test_a_flag_of_ones_own_is_true_or_false(make):
    with pytest.raises(TypeError, match="verbose must be True or False, got 1"):
        optimizer(make, verbose=1)
    opt = optimizer(make)
    opt.param_groups[0]["verbose"] = "yes"
    with pytest.raises(TypeError, match="verbose must be True or False"):
        opt.step()


def test_a_late_group_has_the_seed_of_the_others():
    """All matrices of a step share one random length."""
    opt = optimizer(nucleon.Leon, seed=3)
    opt.param_groups[0]["seed"] = 4  # as a loaded state does
    opt.add_param_group({"params": [torch.zeros(2, 2)]})
    assert opt.param_groups[1]["seed"] == 4
    with pytest.raises(ValueError, match="the seeds 4 and 5; pass one seed to the constructor"):
        opt.add_param_group({"params": [torch.zeros(2, 2)], "seed": 5})
    assert len(opt.param_groups) == 2


def test_an_option_of_the_structure_makes_another_list():
    opt = optimizer(Damped)
    opt.step()
    first = opt._worklist
    for name, value, kept in (("damping", 2.0, True), ("iterations", 4, False)):
        opt.param_groups[0][name] = value
        opt.step()
        assert (opt._worklist is first) is kept


def test_an_option_of_the_run_is_not_loaded():
    opt = optimizer(Damped, wire_dtype=torch.bfloat16)
    opt.load_state_dict(optimizer(Damped, damping=3.0).state_dict())
    group = opt.param_groups[0]
    assert group["wire_dtype"] is torch.bfloat16 and group["damping"] == 3.0


def test_the_constructor_names_the_group_form_of_another_route():
    weight, bias = torch.zeros(3, 5), torch.zeros(5)
    with pytest.raises(TypeError, match=r"no option 'route' \('route': write {") as refusal:
        nucleon.Muon([bias], route="adamw")
    group = re.search(r"write ({.*}), a group", str(refusal.value))[1].replace("...", "bias")
    opt = nucleon.Muon([eval(group, {"bias": bias})])
    assert repr(opt) == "Muon(\n  adamw: 1 parameter, lr=0.001\n)"
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = nucleon.Muon([weight, weight])
    assert opt.param_groups[0]["params"] == [weight]


def test_a_class_of_options_says_every_default():
    class Bare(nucleon.optim.LeonOptions, total=False):
        damping: float | None

    with pytest.raises(TypeError, match="damping of Bare has no default; write Annotated"):
        options.added_by(Bare)


def test_a_subclass_names_only_what_it_adds():
    class Mixed:
        own_options = {"blend": 0.25}  # noqa: RUF012

    class Sub(Mixed, Damped):
        own_options = {"extra": 3, "damping": 1.5}  # noqa: RUF012

    group = optimizer(Sub, extra=4).param_groups[0]
    found = [group[name] for name in ("blend", "extra", "damping", "beta2")]
    assert found == [0.25, 4, 1.5, None]
    model = torch.nn.Linear(4, 6, bias=False)
    group = Sub.for_model(model, head=None, blend=0.5, method="eigh").param_groups[0]
    assert (group["blend"], group["method"]) == (0.5, "eigh")


def test_a_bound_needs_no_smoothing_scale():
    """The factor of a method without that option is 1."""

    class Bounded(nucleon.optim.MatrixOptimizer):
        name, has_gram, own_options = "bounded", True, {"gradient_bound": 2.0}

        def direction(self, total, smoothing, context):
            return smoothing @ total

    opt = optimizer(Bounded, momentum=0.5, lr=1.0, scale="none")
    opt.step()
    gradient = torch.ones(3, 5)
    moved = (16.0 * torch.eye(3) + gradient @ gradient.mT) @ gradient
    assert torch.allclose(opt.param_groups[0]["params"][0], -moved)


def test_an_option_of_another_method_is_a_mistake_in_a_group_unless_a_user_s():
    class Labelled(nucleon.Muon):
        name, own_options = "labelled", {"label": 1.0}

    param = torch.zeros(3, 5, requires_grad=True)
    for name, value in (("beta2", 0.9), ("samples", 2)):
        with pytest.raises(TypeError, match=f"muon has no option '{name}'"):
            nucleon.Muon([{"params": [param], name: value}])
    for make in (nucleon.Muon, Labelled):  # where it is a word of the user's
        assert make([{"params": [param], "label": 2.0}]).param_groups[0]["label"] == 2.0


def test_the_own_options_of_all_optimizers_are_known():
    ours = [make.__self__ for make in optim.OPTIMIZERS.values()]
    assert {name for make in ours for name in make.own_options} == options.OWN_OPTIONS


def rates_in(function):
    """The default of lr in a signature."""
    return inspect.signature(function).parameters["lr"].default


@pytest.mark.parametrize("make", [nucleon.Muon, nucleon.Pion, nucleon.Leon])
def test_every_signature_has_the_defaults_of_the_base_class(make):
    """They are written once per class and overload, where a type checker looks for keywords."""
    assert rates_in(make.__init__) == rates_in(optim.MatrixOptimizer.__init__)
    wanted = rates_in(optim.MatrixOptimizer.for_model)
    assert rates_in(make.for_model) == wanted
    assert rates_in(optim.create) == wanted
