"""Adaptive matrix online learning over the operator-norm ball, and its optimizers."""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon import learners, linalg, optim, potentials, regret, streams, theory
    from nucleon.game import Trace, play
    from nucleon.optim import O2NC, Leon, Muon, Pion, create, list_optimizers

__version__ = "0.1.0"

__all__ = [
    "O2NC",
    "Leon",
    "Muon",
    "Pion",
    "Trace",
    "create",
    "learners",
    "linalg",
    "list_optimizers",
    "optim",
    "play",
    "potentials",
    "regret",
    "streams",
    "theory",
]

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "game": "play Trace",
        "optim": "create Leon list_optimizers Muon O2NC Pion",
    },
)
