"""Adaptive matrix online learning over the operator-norm ball, and its optimizers.

Imports `optim`, `online` and `linalg` when a name of theirs is used: `import nucleon` is quick.
"""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon import linalg, online, optim
    from nucleon.optim import Leon, Muon, Pion, converted, create

__version__ = "0.1.0"

__all__ = [
    "Leon",
    "Muon",
    "Pion",
    "converted",
    "create",
    "linalg",
    "online",
    "optim",
]

__getattr__, __dir__ = _lazy.attach(__name__, __all__, {"optim": "converted create Leon Muon Pion"})
