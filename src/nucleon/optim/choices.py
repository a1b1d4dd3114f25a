"""What of an optimizer is compared across ranks, as text: its parameters and its options."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Any]]


def digest(groups: Groups) -> str:
    """Of the names, where given, shapes and dtypes of all parameters, in whatever groups."""
    listed = sorted(
        f"{name} {tuple(param.shape)} {param.dtype}"
        for g in groups
        for name, param in zip_longest(g.get("param_names") or (), g["params"])
    )
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()


def asked(groups: Groups) -> list[tuple[str, int | None]]:
    """What of the options decides whether an optimizer exchanges anything."""
    return [(g["placement"], g["consistency_every"]) for g in groups]


def apart(groups: Groups) -> bool:
    """Whether it is not to be compared with those of other ranks."""
    return any(g["consistency_every"] is None for g in groups)


def choice(groups: Groups) -> str:
    """All options of an optimizer and of which parameters they are, in whatever order; or nothing.

    Of a schedule they are those of the first step.
    """
    if apart(groups):
        return ""
    left_out = ("param_names", "initial_lr")  # the first is in the digest, the second a schedule's
    listed = [
        {name: x for name, x in comparable(g).items() if name not in left_out} | {"of": digest([g])}
        for g in groups
    ]
    listed.sort(key=lambda options: (options["of"], sorted(options.items())))
    return json.dumps(listed, sort_keys=True)


def talk(groups: Groups) -> str:
    """What of the options says with whom an optimizer talks, to be read."""
    found = {
        f"placement={g['placement']!r}, consistency_every={g['consistency_every']}"
        for g in groups
        if g["rule"] == "matrix"
    }
    return " and ".join(sorted(found)) or "no matrices"


def comparable(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a group as text; a rate may be a tensor on a device, or a number of NumPy's.

    What no option can be, of a scheduler or of the user's own, is left out.
    """
    found = {name: _text(value) for name, value in group.items() if name != "params"}
    return {name: text for name, text in found.items() if text}


def _text(value: object) -> str:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, cast(Sequence[object], value)))})"
    if isinstance(value, bool | str | torch.dtype | None):
        return repr(value)
    if isinstance(value, Real):
        return repr(int(value) if isinstance(value, Integral) else float(value))
    return ""
