"""The parameters of a model, with all places of each in the modules, and their roles."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from nucleon.optim.matrices.parameters import canonical, root_of
from nucleon.optim.routing import fused


@dataclass(frozen=True)
class Role:
    """The route of a parameter, with the axes of a matrix."""

    route: Literal["matrix", "adamw", "frozen"]
    reason: str
    axes: str | None = None
    layouts: Mapping[str, str] | None = None
    """Other possible axes by their meaning, if the weight may contain several maps."""


@dataclass(frozen=True)
class Place:
    """A place of a parameter: attribute `key` of `module`, a child of `parent`.

    For a parametrized weight these are the module that uses the weight, and its parent.
    """

    module: nn.Module
    parent: nn.Module | None
    path: str
    """Path of the module that contains the parameter, from the root."""
    key: str
    param: Tensor
    as_map: tuple[nn.Module | None, str]
    """The module that uses the map, and its name there: `qkv` for `qkv.linear` beside a norm."""

    @property
    def name(self) -> str:
        """The name of the parameter, from the root."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @property
    def called(self) -> str:
        """The name of the module in its parent."""
        return _user(self.path).rpartition(".")[2]


@dataclass
class Parameter:
    """A parameter with its places, what overrides say of it, and its role."""

    param: Tensor
    places: list[Place] = field(default_factory=list[Place])
    names: list[str] = field(default_factory=list[str])
    """The names in all places, without parts of wrappers."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options from overrides."""
    overridden: bool = False
    """True if an override sets its route or axes."""
    role: Role = field(init=False)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def may_warn(self) -> bool:
        """True if a doubt should be reported: it is trainable, and no override routes it."""
        return self.param.requires_grad and not self.overridden


def parameters_of(model: nn.Module) -> Sequence[Parameter]:
    """Return every parameter once, with all its places."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model "
            f"itself, as for_model(model): parameters are routed by their modules"
        )
    root = root_of(name for name, _ in model.named_parameters())
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters: dict[Tensor, Parameter] = {}
    for path, holder in modules.items():
        user = _user(path)
        outer, _, called = user.rpartition(".")
        above, _, beside = outer.rpartition(".")
        parent = modules.get(outer) if user else None
        as_map = parent, called
        if outer and fused.named(beside) and not fused.named(called):
            weights = [] if parent is None else [p for p in parent.parameters() if p.ndim > 1]
            if len(weights) == 1:
                as_map = modules.get(above), beside
        module = modules[user] if isinstance(holder, ParametrizationList) else holder
        for key, param in holder.named_parameters(recurse=False, remove_duplicate=False):
            place = Place(module, parent, path, key, param, as_map)
            if is_lazy(param):
                raise ValueError(
                    f"{place.name} has no shape yet; run a batch through the model first"
                )
            parameter = parameters.setdefault(param, Parameter(param))
            parameter.places.append(place)
            parameter.names.append(canonical(place.name, root))
    return list(parameters.values())


_TAIL = re.compile(
    r"(\.(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod|base_layer))*"
    r"(\.parametrizations\.\w+)?$"
)


def _user(path: str) -> str:
    """Return the path of a module without a suffix of wrappers and parametrizations."""
    return _TAIL.sub("", f".{path}", count=1)[1:]
