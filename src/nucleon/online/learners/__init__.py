"""Learners over the operator-norm ball, one learner or family per file.

Imports potentials, theory, regret and `nucleon.linalg`, no streams.
"""

from collections.abc import Mapping
from types import MappingProxyType

from nucleon.online.learners.adagrad import AdaGradFTRL, AdaGradOGD, AdaGradOptions
from nucleon.online.learners.base import Learner, LearnerOptions
from nucleon.online.learners.ftpl import FTPL, GaussianFTPL
from nucleon.online.learners.gbpa import FAML, FTL, FTRL, GBPA, GameOptions
from nucleon.online.learners.scalar_gbpa import ScalarGBPA
from nucleon.online.learners.shampoo import (
    KroneckerFTRL,
    OneSidedShampoo,
    ProjectionOptions,
    Shampoo,
    ShampooOptions,
)

LEARNERS: Mapping[str, type[Learner]] = MappingProxyType(
    {
        learner.name: learner
        for learner in (
            FTL,
            FTRL,
            FTPL,
            FAML,
            Shampoo,
            OneSidedShampoo,
            KroneckerFTRL,
            ScalarGBPA,
            AdaGradOGD,
            AdaGradFTRL,
            GaussianFTPL,
        )
    }
)
"""Every learner by the name that traces and the command line use."""

__all__ = [
    "FAML",
    "FTL",
    "FTPL",
    "FTRL",
    "GBPA",
    "LEARNERS",
    "AdaGradFTRL",
    "AdaGradOGD",
    "AdaGradOptions",
    "GameOptions",
    "GaussianFTPL",
    "KroneckerFTRL",
    "Learner",
    "LearnerOptions",
    "OneSidedShampoo",
    "ProjectionOptions",
    "ScalarGBPA",
    "Shampoo",
    "ShampooOptions",
]
