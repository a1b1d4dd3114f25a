"""What a direction and an update may depend on besides the moments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nucleon.optim.stacks import Stack


@dataclass(frozen=True)
class Situation:
    """What a direction and an update may depend on besides the moments."""

    group: Mapping[str, Any]
    """The options of the parameter group."""
    stream: Tensor
    """(b,) int64: the identity of each matrix, for noise."""
    step: Tensor
    """0-d int64: the number of this step."""


def situation(
    stack: Stack, states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
) -> Situation:
    """The situation of a stack, by the states of its pieces."""
    return Situation(group, stack.gather_own([s["stream"] for s in states]), states[0]["step"])
