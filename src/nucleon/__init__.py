"""Adaptive matrix online learning over the operator-norm ball, and its optimizers."""

from nucleon import linalg, optim, potentials
from nucleon.optim import Leon, Muon, Pion

__version__ = "0.1.0"

__all__ = ["Leon", "Muon", "Pion", "linalg", "optim", "potentials"]
