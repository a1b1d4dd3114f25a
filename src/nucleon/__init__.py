"""Adaptive matrix online learning over the operator-norm ball, and its optimizers."""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon import learners, linalg, o2nc, optim, potentials, regret, streams, theory
    from nucleon.game import Trace, play
    from nucleon.o2nc import O2NC, estimate, plan
    from nucleon.optim import Leon, Muon, Pion, create, list_optimizers

__version__ = "0.1.0"

__all__ = [
    "O2NC",
    "Leon",
    "Muon",
    "Pion",
    "Trace",
    "create",
    "estimate",
    "learners",
    "linalg",
    "list_optimizers",
    "o2nc",
    "optim",
    "plan",
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
        "o2nc": "O2NC estimate plan",
        "optim": "create Leon list_optimizers Muon Pion",
    },
)
