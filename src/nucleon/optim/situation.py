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
    stack: Stack
    """The matrices."""
    states: Sequence[Mapping[str, Tensor]]
    """The state of the parameter of each of its pieces."""

    @property
    def stream(self) -> Tensor:
        """(b,) int64: the identity of each matrix, for noise."""
        return self.stack.gather_own([state["stream"] for state in self.states])

    @property
    def step(self) -> Tensor:
        """0-d int64: the number of this step."""
        return self.states[0]["step"]
