"""Objectives and applications of the paper, and processes against which methods are tested.

Imports learners, regret and `nucleon.linalg`; only claims, tests and users import it.
"""

from nucleon.online.problems.kinks import Kinks, random_kinks
from nucleon.online.problems.quasi_newton import CurvatureLearner, Minimum, online_quasi_newton
from nucleon.online.problems.resistance import Resistance
from nucleon.online.problems.ripples import Ripples, random_ripples, random_start
from nucleon.online.problems.rotations import OnlineRotations, Registration, SignRounding

__all__ = [
    "CurvatureLearner",
    "Kinks",
    "Minimum",
    "OnlineRotations",
    "Registration",
    "Resistance",
    "Ripples",
    "SignRounding",
    "online_quasi_newton",
    "random_kinks",
    "random_ripples",
    "random_start",
]
