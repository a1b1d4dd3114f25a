"""Objectives that the paper motivates or tests its methods with."""

from nucleon.problems.kinks import Kinks, random_kinks
from nucleon.problems.resistance import Resistance
from nucleon.problems.ripples import Ripples, random_ripples, random_start

__all__ = ["Kinks", "Resistance", "Ripples", "random_kinks", "random_ripples", "random_start"]
