"""Adaptive matrix online learning over the operator-norm ball, and its optimizers."""

__version__ = "0.1.0"
