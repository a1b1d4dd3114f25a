"""Learners over the operator-norm ball: play an action, observe its gradient, know the bound."""

from collections.abc import Mapping
from types import MappingProxyType

from nucleon.learners.adagrad import AdaGradFTRL, AdaGradOGD, AdaGradOptions
from nucleon.learners.base import Learner, LearnerOptions
from nucleon.learners.ftpl import FTPL
from nucleon.learners.gaussian_ftpl import GaussianFTPL
from nucleon.learners.gbpa import FAML, FTL, FTRL, GBPA, GameOptions
from nucleon.learners.kronecker import KroneckerFTRL
from nucleon.learners.projected import ProjectionOptions
from nucleon.learners.scalar_gbpa import ScalarGBPA
from nucleon.learners.shampoo import OneSidedShampoo, Shampoo, ShampooOptions
from nucleon.learners.vectors import BoxLedger

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
    "BoxLedger",
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
