"""Parameters that are added to a routed optimizer after it was made."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nucleon.optim.matrices.parameters import canonical, root_of
from nucleon.optim.routing import routing

_OWN = ("params", "aux_lr", "aux", "head", "overrides")
"""Arguments of `for_model` in a group; the rest are options of the method."""


@dataclass(frozen=True)
class Later:
    """Arguments of `for_model`, which route parameters that are added later."""

    model: "weakref.ref[nn.Module]"
    lr: Any
    aux_lr: Any
    given: Mapping[str, Any]
    """The arguments `aux`, `head` and `overrides` of `for_model`."""
    known: set[str]
    """The options that a matrix may have."""

    def groups(self, group: Mapping[str, Any], taken: Mapping[Tensor, str]) -> list[dict[str, Any]]:
        """Return the groups of a module, or of parameters of the model: matrices and the rest.

        The lr of the group is that of the matrices; without an aux_lr, AdamW's keeps its ratio.

        Args:
            group: "params", a module or parameters with or without names, and options; those of
                `for_model` too.
            taken: parameters that the optimizer has, with their names.
        """
        routed = self._routed(group, taken)
        options = {name: value for name, value in group.items() if name not in _OWN}
        routing.check_names("param_group", options, self.known | {"initial_lr"})
        lr = options.pop("lr", self.lr)
        ratio = self.aux_lr / self.lr if self.lr else 1.0
        aux_lr = group.get("aux_lr", lr * ratio if "lr" in group else self.aux_lr)
        aux = group.get("aux", self.given["aux"]) or {}
        shared = {name: options[name] for name in ("maximize", "nonfinite") if name in options}
        return routed.groups({**options, "lr": lr}, {**shared, **aux, "lr": aux_lr})

    def _routed(self, group: Mapping[str, Any], taken: Mapping[Tensor, str]) -> routing.Routed:
        given, model = group["params"], self.model()
        inside = dict(model.named_parameters(remove_duplicate=False)) if model is not None else {}
        known = {param: name for name, param in inside.items()}
        wanted = _parameters(given)
        twice = [taken[param] for param in wanted if param in taken]
        if twice:
            raise ValueError(
                f"the optimizer has {', '.join(twice)} already, frozen or not: what is unfrozen "
                f"trains from its first gradient on"
            )
        arguments = {name: group.get(name, self.given[name]) for name in self.given}
        if model is not None and all(param in known for param in wanted):
            return routing.routed(model, **arguments, known=self.known, only=set(wanted))
        if not isinstance(given, nn.Module):
            strange = [name for param, name in wanted.items() if param not in known]
            raise ValueError(
                f"{', '.join(strange)} of params is not in the model, so that nothing tells where "
                f'it goes; pass its module, or a name and a route with it, as in {{"params": '
                f'[("extra.weight", parameter)], "route": "adamw"}}, or "matrix"'
            )
        # The head and the overrides are those of the model.
        alone = {"aux": arguments["aux"], "head": None, "overrides": None}
        alone |= {name: group[name] for name in alone if name in group}
        routed = routing.routed(given, **alone, known=self.known)
        root = root_of(wanted.values())
        names = {canonical(name, root) for name in wanted.values()} & set(taken.values())
        if names:
            raise ValueError(
                f"the optimizer has other parameters named {', '.join(sorted(names))}; put the "
                f"module into the model before it is added, so that its names are its own"
            )
        return routed


def _parameters(given: Any) -> dict[Tensor, str]:
    """Return the parameters of a module or a list, with names."""
    if isinstance(given, nn.Module):
        return {param: name for name, param in given.named_parameters()}
    items = [given] if isinstance(given, Tensor) else list(given)
    pairs = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(items)]
    for name, param in pairs:
        if not isinstance(param, Tensor):
            raise TypeError(f"{name} of params must be a tensor, got {type(param).__name__}")
    return {param: name for name, param in pairs}
