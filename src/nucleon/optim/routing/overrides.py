"""Overrides of single parameters: routes, axes and options, by globs or by functions."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from nucleon import _checks
from nucleon.optim.options import OverrideOf, Overrides
from nucleon.optim.routing.places import Parameter

ROUTES = ("matrix", "adamw", "frozen")


def apply(parameters: Sequence[Parameter], overrides: Overrides | None) -> None:
    """Write the overrides into each parameter; a later override replaces an earlier one."""
    if isinstance(overrides, tuple):
        for each in overrides:
            apply(parameters, each)
    elif callable(overrides):
        _apply_function(parameters, overrides)
    else:
        _apply_globs(parameters, overrides or {})


def differing(values: Mapping[Tensor, Mapping[str, Any]], shared: Mapping[str, Any]) -> OverrideOf:
    """Return the overrides of the parameters whose options, `values`, are not the shared ones."""

    def override(name: str, module: nn.Module, parameter: Tensor) -> Mapping[str, Any]:
        options = values.get(parameter, {})
        return {name: x for name, x in options.items() if name not in shared or shared[name] != x}

    return override


def _apply_globs(parameters: Sequence[Parameter], overrides: Mapping[str, Any]) -> None:
    check_mapping("overrides", overrides, "a function or a dict")
    for glob, override in overrides.items():
        wish = _wish(f"the override {glob!r}", override)
        matched = _matched(parameters, glob)
        if not matched:
            names = [name for p in parameters for name in p.names]
            near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
            raise ValueError(
                f"the override {glob!r} matches no parameter; it is a glob over the names of "
                f"model.named_parameters(), such as {near[0] if near else 'head.weight'!r}"
            )
        for parameter in matched:
            _add(parameter, wish, glob)


def _apply_function(parameters: Sequence[Parameter], function: OverrideOf) -> None:
    """Call a function for every place of a parameter; equal options share a group."""
    for parameter in parameters:
        for name, place in zip(parameter.names, parameter.places, strict=True):
            override = function(name, place.module, cast(nn.Parameter, parameter.param))
            if override is not None:
                wish = _wish(f"what overrides return for {name!r}", override)
                _add(parameter, wish, ", ".join(_written(wish)))


def _written(wish: Mapping[str, Any]) -> Iterator[str]:
    """Yield each option as text; a tensor by its identity, since a schedule may change it."""
    for name in sorted(set(wish) - {"route", "axes"}):
        value = wish[name]
        yield f"{name}={id(value) if isinstance(value, Tensor) else repr(value)}"


def _wish(name: str, override: object) -> Mapping[str, Any]:
    wish = {"route": override} if isinstance(override, str) else override
    check_mapping(name, wish, f"one of {ROUTES} or a dict")
    wish = cast(Mapping[str, Any], wish)
    if "route" in wish:
        _checks.choice(f"the route of {name}", wish["route"], ROUTES)
    return wish


def _add(parameter: Parameter, wish: Mapping[str, Any], by: str) -> None:
    parameter.wish |= wish
    if set(wish) - {"route", "axes"}:
        parameter.overridden_by += (by,)


def _matched(parameters: Sequence[Parameter], glob: str) -> list[Parameter]:
    """Return the parameters whose canonical name matches, else those whose wrapped name does."""
    return [p for p in parameters if any(fnmatchcase(name, glob) for name in p.names)] or [
        p for p in parameters if any(fnmatchcase(place.name, glob) for place in p.places)
    ]


def check_mapping(name: str, value: object, kinds: str = "a dict") -> None:
    """Check that a value is a mapping with names as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be {kinds} with names as keys, got {value!r}")
