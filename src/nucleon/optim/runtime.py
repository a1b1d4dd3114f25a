"""What an optimizer keeps between steps beside its state."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nucleon.optim.average import Averaging
from nucleon.optim.matrices.parameters import ParameterInfo
from nucleon.optim.routing.explanation import Row
from nucleon.optim.routing.later import Later
from nucleon.optim.worklist import Worklist

COPIED = ("infos", "left_out", "note", "numbers", "averaging")
"""What of it a copy of the optimizer has."""


@dataclass
class Runtime:
    """What an optimizer keeps between steps beside its state."""

    infos: dict[Tensor, ParameterInfo] = field(default_factory=dict[Tensor, ParameterInfo])
    worklist: Worklist | None = None
    averaging: Averaging = field(default_factory=Averaging)
    entered: set[Tensor] = field(default_factory=set[Tensor])
    """Parameters that have had a gradient: later, a missing one is a mask."""
    numbers: frozenset[int] = frozenset()
    """Of the streams of noise in a loaded state, which may count the parameters otherwise."""
    checked: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])
    """The values of watched options that were found good, by the identity of the group."""
    agreed: bool = False
    """Whether the ranks have compared parameters and options."""
    later: Later | None = None
    """How the model was routed, for what is added; None where parameters were given."""
    left_out: tuple[Row, ...] = ()
    """Parameters of the model that routing left out."""
    note: str = ""
    """What routing wants its user to know."""
    rates: dict[Tensor, Any] = field(default_factory=dict[Tensor, Any])
    """The rate that each parameter's group was added with."""
    last_rates: list[Any] = field(default_factory=list[Any])
    """Of the groups at the last step: a scheduler has moved on when figures of it are asked for."""
    warned: bool = False
    """Whether it was said that a scheduler takes, or may take, all groups to one rate."""
