"""What an optimizer keeps between steps beside its state, and what it checks before each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nucleon.optim import options
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.parameters import ParameterInfo
from nucleon.optim.routing.explanation import Row
from nucleon.optim.routing.later import Later
from nucleon.optim.state import State
from nucleon.optim.worklist import Worklist

COPIED = ("infos", "with_names", "left_out", "note")
"""What of it a copy of the optimizer has."""


@dataclass
class Runtime:
    """What an optimizer keeps between steps beside its state."""

    infos: dict[Tensor, ParameterInfo] = field(default_factory=dict[Tensor, ParameterInfo])
    with_names: bool = False
    """Whether the parameters were given with names."""
    worklist: Worklist | None = None
    entered: set[Tensor] = field(default_factory=set[Tensor])
    """Parameters that have had a gradient: later, a missing one is a mask."""
    steps: int = 0
    agreed: bool = False
    """Whether the ranks have compared parameters and options."""
    later: Later | None = None
    """How the model was routed, for what is added; None where parameters were given."""
    left_out: tuple[Row, ...] = ()
    """Parameters of the model that routing left out."""
    note: str = ""
    """What routing wants its user to know."""


def check_gradients(
    name: str,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, State],
    infos: Mapping[Tensor, ParameterInfo],
) -> None:
    """Raise on rates and gradients that the optimizer `name` cannot step with, changing nothing."""
    for group in groups:
        options.check_rates(group)
        if group["certify"]:
            found = [states.get(p, {}) for p in group["params"]]
            if any("total" in s and "played" not in s for s in found):
                raise ValueError(
                    "certify was switched on during the run; pass certify=True when the group "
                    "is added, so that its regret is kept from the start"
                )
        for param in group["params"]:
            gradient = param.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{name} takes dense gradients, {infos[param].name} of shape "
                    f"{tuple(param.shape)} has layout {gradient.layout}; use sparse=False or "
                    f"another optimizer for it"
                )
    strict = [g for g in groups if g["nonfinite"] == "raise"]
    for param in chain.from_iterable(g["params"] for g in strict):
        if param.grad is not None and not torch.isfinite(shards.local(param.grad)).all():
            raise ValueError(
                f"the gradient of {infos[param].name} is not finite; nonfinite='skip' would leave "
                f"it out of this step"
            )
