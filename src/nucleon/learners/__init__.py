"""Learners over the operator-norm ball: play an action, observe its gradient, know the bound."""

from collections.abc import Mapping
from types import MappingProxyType

from nucleon.learners.base import Learner
from nucleon.learners.gbpa import FAML, FTL, FTPL, FTRL, GBPA, GameOptions

LEARNERS: Mapping[str, type[Learner]] = MappingProxyType(
    {learner.name: learner for learner in (FTL, FTRL, FTPL, FAML)}
)
"""Every learner by the name that traces and the command line use."""

__all__ = ["FAML", "FTL", "FTPL", "FTRL", "GBPA", "LEARNERS", "GameOptions", "Learner"]
