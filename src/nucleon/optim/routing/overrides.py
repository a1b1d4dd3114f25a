"""Overrides of single parameters: routes, axes and options, by globs or by functions."""

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from nucleon import _checks
from nucleon.optim.options import Overrides
from nucleon.optim.routing.places import Parameter

ROUTES = ("matrix", "adamw", "frozen")


def apply(parameters: Sequence[Parameter], overrides: Overrides | None) -> None:
    """Write the overrides into each parameter; a later override replaces an earlier one."""
    if isinstance(overrides, tuple):
        for each in overrides:
            apply(parameters, each)
    elif callable(overrides):
        for parameter in parameters:
            for name, place in zip(parameter.names, parameter.places, strict=True):
                override = overrides(name, place.module, cast(nn.Parameter, parameter.param))
                if override is not None:
                    parameter.options |= _options(f"what overrides return for {name!r}", override)
    elif overrides is not None:
        check_mapping("overrides", overrides, "a function or a dict")
        for glob, override in overrides.items():
            options = _options(f"the override {glob!r}", override)
            for parameter in _matched(parameters, glob):
                parameter.options |= options


def _options(name: str, override: object) -> Mapping[str, Any]:
    options = {"route": override} if isinstance(override, str) else override
    check_mapping(name, options, f"one of {ROUTES} or a dict")
    options = cast(Mapping[str, Any], options)
    if "route" in options:
        _checks.choice(f"the route of {name}", options["route"], ROUTES)
    return options


def _matched(parameters: Sequence[Parameter], glob: str) -> list[Parameter]:
    """Return the parameters whose canonical name matches, else those whose wrapped name does."""
    matched = [p for p in parameters if any(fnmatchcase(name, glob) for name in p.names)] or [
        p for p in parameters if any(fnmatchcase(place.name, glob) for place in p.places)
    ]
    if not matched:
        names = [name for p in parameters for name in p.names]
        near = difflib.get_close_matches(glob, names, n=1, cutoff=0.0)
        raise ValueError(
            f"the override {glob!r} matches no parameter; it is a glob over the names of "
            f"model.named_parameters(), such as {near[0] if near else 'head.weight'!r}"
        )
    return matched


def check_mapping(name: str, value: object, kinds: str = "a dict") -> None:
    """Check that a value is a mapping with names as keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name} must be {kinds} with names as keys, got {value!r}")
