"""Overrides from options that are known parameter by parameter, as of another optimizer."""

import glob
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from nucleon.optim.options import Override


def overrides(
    model: nn.Module, values: Mapping[Tensor, Mapping[str, Any]], shared: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return {glob: options} for the parameters whose options differ from the shared ones."""
    names = [(name, p) for name, p in model.named_parameters(remove_duplicate=False)]
    apart = {
        param: {name: x for name, x in own.items() if name not in shared or shared[name] != x}
        for param, own in values.items()
    }

    def alike(pattern: str, options: Mapping[str, Any]) -> bool:
        return all(apart.get(p) == options for name, p in names if fnmatchcase(name, pattern))

    found: dict[str, dict[str, Any]] = {}
    for name, param in names:
        if options := apart.get(param):
            # One glob for the same parameter of all layers, where they agree.
            layers = [re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name, count=count) for count in (0, 1)]
            globs = [pattern for pattern in layers if alike(pattern, options)]
            found[globs[0] if globs else glob.escape(name)] = options
    return found


def merged(
    first: Mapping[str, Mapping[str, Any]], users: Mapping[str, Override] | None
) -> dict[str, dict[str, Any]]:
    """Return the first overrides, then those of a user, which win key by key."""
    found = {pattern: dict(own) for pattern, own in first.items()}
    for pattern, wish in (users or {}).items():
        wish = {"route": wish} if isinstance(wish, str) else wish
        found[pattern] = {**found.pop(pattern, {}), **wish}
    return found
