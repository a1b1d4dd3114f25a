"""torchtitan's container: AdamW's parameters have what torchtitan itself would give them.

Where torchtitan is not installed, its few names that the container uses stand here, with the
fields and defaults of 0.3.0; `make test-torchtitan` has the real ones.
"""

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

T = TypeVar("T")
OPTIONS = ("lr", "betas", "eps", "weight_decay")


@dataclass(kw_only=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str = "AdamW"
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


class OptimizersContainer(torch.optim.Optimizer, Generic[T]):
    @dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    def _log_optimizer(self, optimizer, part, patterns):
        """Nothing is logged."""


class Validator:
    Config = OptimizersContainer.Config


class CheckpointManager:
    Config = OptimizersContainer.Config


def derive(source, target, **deltas):
    return target(**{f.name: getattr(source, f.name) for f in fields(source)}, **deltas)


def stand_ins():
    """The modules of torchtitan that the container imports."""
    names = "torchtitan", "torchtitan.components", "torchtitan.components.optimizer"
    modules = {name: ModuleType(name) for name in (*names, "torchtitan.config")}
    optimizers = {"OptimizersContainer": OptimizersContainer, "ParamGroupConfig": ParamGroupConfig}
    vars(modules[names[2]]).update(optimizers)
    for module, kind in (("checkpoint", CheckpointManager), ("validate", Validator)):
        name = f"torchtitan.components.{module}"
        modules[name] = ModuleType(name)
        vars(modules[name])[kind.__name__] = kind
    config = {
        "TORCH_DTYPE_MAP": {},
        "derive": derive,
        "override": lambda **_: lambda function: function,
    }
    vars(modules["torchtitan.config"]).update(config)
    return modules


@pytest.fixture(scope="module")
def titan():
    """The integration, and torchtitan's configurations, or their stand-ins."""
    ours = "nucleon.integrations.torchtitan"
    absent = stand_ins() if importlib.util.find_spec("torchtitan") is None else {}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in absent.items():
            patch.setitem(sys.modules, name, module)
        theirs = importlib.import_module("torchtitan.components.optimizer")
        yield SimpleNamespace(
            container=importlib.import_module(ours),
            config=theirs.OptimizersContainer.Config,
            group=lambda pattern, name="AdamW", **options: theirs.ParamGroupConfig(
                pattern=pattern, optimizer_name=name, optimizer_kwargs=options
            ),
        )
    if absent:
        del sys.modules[ours]


def model():
    return nn.ModuleDict(
        {
            "tok_embeddings": nn.Embedding(8, 4),
            "layers": nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)),
            "norm": nn.LayerNorm(4),
            "lm_head": nn.Linear(4, 8, bias=False),
        }
    )


def options_of(titan, groups, options=None, **config):
    """{name: AdamW's options} of a container."""
    config = titan.config(param_groups=groups, **config)
    derived = titan.container.leon(config, **{"lr": 0.5, **(options or {})})
    container = titan.container.MatrixOptimizers(derived, model_parts=[model()])
    (optimizer,) = container.optimizers
    return {
        optimizer.infos[param].name: {name: group[name] for name in OPTIONS}
        for group in optimizer.param_groups
        if group["route"] == "adamw"
        for param in group["params"]
    }


def by_torch(groups, factory):
    """Options of torch's own AdamW, each parameter in the first pattern that has its name."""
    result = {}
    for name, param in model().named_parameters():
        if not name.startswith("layers"):
            group = next(g for g in groups if re.search(g.pattern, name))
            params = [{"params": [param], **group.optimizer_kwargs}]
            options = factory.get(group.optimizer_name, {})
            made = getattr(torch.optim, group.optimizer_name)(params, **options)
            result[name] = {option: made.param_groups[0][option] for option in OPTIONS}
    return result


LAST = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
CASES = {
    "a rate alone": [("norm", "AdamW", {"lr": 1e-3}), (".*", "AdamW", LAST)],
    "a decay alone": [("norm", "AdamW", {"weight_decay": 0.0}), (".*", "AdamW", LAST)],
    "nothing at all": [("norm", "AdamW", LAST), (".*", "AdamW", {})],
    "Adam": [("tok", "Adam", {"lr": 1e-4}), (".*", "AdamW", LAST)],
    "how it is computed": [(".*", "AdamW", {"lr": 1e-4, "fused": True})],
}


@pytest.mark.parametrize("factory", [{}, {"AdamW": {"weight_decay": 0.3, "betas": (0.5, 0.6)}}])
@pytest.mark.parametrize("case", CASES)
def test_adamw_has_what_torchtitan_would_give_it(titan, case, factory):
    groups = [titan.group(pattern, name, **options) for pattern, name, options in CASES[case]]
    result = options_of(titan, groups, optimizer_factory_kwargs_by_name=factory)
    assert result == by_torch(groups, factory)


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_how_torch_would_compute_changes_nothing(titan, implementation):
    groups = [titan.group(".*", **LAST)]
    assert options_of(titan, groups, implementation=implementation) == by_torch(groups, {})


def test_a_state_has_no_names_that_grow_with_the_model(titan):
    """Flat, it would repeat the names of all parameters for each; they are in its keys already."""
    derived = titan.container.leon(titan.config(), lr=0.5)
    container, again = (
        titan.container.MatrixOptimizers(derived, model_parts=[model()]) for _ in range(2)
    )
    state = container.state_dict()
    assert "state.layers.0.weight.total" in state
    assert not [key for key in state if key.endswith("param_names")]
    state["state.layers.0.weight.total"].fill_(3.0)
    again.load_state_dict(state)
    weight = again.model_parts[0]["layers"][0].weight
    assert again.optimizers[0].state[weight]["total"].eq(3.0).all()


def test_without_groups_it_has_the_defaults_of_for_model(titan):
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert options_of(titan, [])["norm.weight"] == defaults


def test_an_override_changes_what_it_names_and_nothing_else(titan):
    groups = [titan.group("norm", lr=1e-3), titan.group(".*", **LAST)]
    overrides = {"norm.weight": {"eps": 0.5}}
    result = options_of(titan, groups, {"overrides": overrides, "aux": {"betas": (0.1, 0.2)}})
    plain = by_torch(groups, {})
    for name in plain:
        more = {"eps": 0.5} if name == "norm.weight" else {}
        assert result[name] == {**plain[name], "betas": (0.1, 0.2), **more}


def test_what_is_not_the_same_here_is_refused_with_what_to_write(titan):
    with pytest.raises(ValueError, match=r"'norm'.*weight_decay=0\.1.*optimizer_name='AdamW'"):
        options_of(titan, [titan.group("norm", "Adam", weight_decay=0.1), titan.group(".*")])
    with pytest.raises(ValueError, match=r"lm_head\.weight goes to AdamW.*pattern='\.\*'"):
        options_of(titan, [titan.group("norm|tok")])
    with pytest.raises(ValueError, match="write 'fused'"):
        options_of(titan, [titan.group(".*")], implementation="fused_opt_states_bf16")
    with pytest.raises(TypeError, match="amsgrad"):
        options_of(titan, [titan.group(".*", amsgrad=True)])
