"""Objectives that the paper motivates or tests its methods with."""

from nucleon.problems.ripples import Ripples, random_ripples, random_start

__all__ = ["Ripples", "random_ripples", "random_start"]
