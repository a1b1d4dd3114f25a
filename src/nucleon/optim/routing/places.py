"""The parameters of a model, all places of each in the modules, and its route."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from nucleon.optim.matrices.parameters import canonical, root_of
from nucleon.optim.routing import ambiguous


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
    grandparent: nn.Module | None = None

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
        return owner(self.path).rpartition(".")[2]

    @property
    def as_map(self) -> tuple[nn.Module | None, str]:
        """The module that uses the map, and its name there: `qkv` for `qkv.linear` and a norm."""
        outer = owner(self.path).rpartition(".")[0].rpartition(".")[2]
        weights = [] if self.parent is None else [p for p in self.parent.parameters() if p.ndim > 1]
        if len(weights) == 1 and ambiguous.named(outer) and not ambiguous.named(self.called):
            return self.grandparent, outer
        return self.parent, self.called


_TAIL = re.compile(
    r"(\.(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod|base_layer))*"
    r"(\.parametrizations\.\w+)?$"
)


def owner(path: str) -> str:
    """Return the path of a module without a suffix of wrappers and parametrizations."""
    return _TAIL.sub("", f".{path}", count=1)[1:]


@dataclass
class Parameter:
    """A parameter with its places and its route."""

    param: Tensor
    places: list[Place]
    root: str = ""
    """Prefix that a wrapper of the whole model adds to the names."""
    wish: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options from overrides."""
    overridden_by: tuple[str, ...] = ()
    """Overrides with options; parameters that share them share a group."""
    route: str = ""
    axes: str | None = None
    reason: str = ""
    told: bool = False
    """True if an override sets its route or axes."""
    layouts: Mapping[str, str] | None = None
    """Possible axes by their meaning, if the layout is unknown; else None."""

    @property
    def name(self) -> str:
        """The first name, without parts of wrappers."""
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """The names in all places, without parts of wrappers."""
        return [canonical(place.name, self.root) for place in self.places]

    @property
    def owners(self) -> list[str]:
        """The names of the modules that use it."""
        names = (f"{owner(place.path)}.weight" for place in self.places)
        return [canonical(name, self.root).removesuffix(".weight") for name in names]

    @property
    def asks(self) -> bool:
        """True if a doubt should be reported: it is trainable, and no override routes it."""
        return self.param.requires_grad and not self.told


def parameters_of(model: nn.Module) -> Sequence[Parameter]:
    """Return every parameter once, with all its places."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model "
            f"itself, as for_model(model): parameters are routed by their modules"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters: dict[Tensor, Parameter] = {}
    for path, holder in modules.items():
        user = owner(path)
        outer = user.rpartition(".")[0]
        parent = modules.get(outer) if user else None
        grandparent = modules.get(outer.rpartition(".")[0]) if outer else None
        module = modules[user] if isinstance(holder, ParametrizationList) else holder
        for key, param in holder.named_parameters(recurse=False, remove_duplicate=False):
            place = Place(module, parent, path, key, param, grandparent)
            if is_lazy(param):
                raise ValueError(
                    f"{place.name} has no shape yet; run a batch through the model first"
                )
            parameters.setdefault(param, Parameter(param, [])).places.append(place)
    root = root_of(place.name for p in parameters.values() for place in p.places)
    for parameter in parameters.values():
        parameter.root = root
    return list(parameters.values())
