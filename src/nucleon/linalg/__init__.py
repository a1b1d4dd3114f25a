"""Matrix functions of the theory: checked public functions over unchecked, fixed-step ones.

Imports torch and `nucleon._checks`; every other package may import it.
"""

from nucleon.linalg.augmented import augmented_polar, residual
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.linalg.polar import polar
from nucleon.linalg.projections import (
    QuadraticSolution,
    project_operator_ball,
    quadratic_projection,
)
from nucleon.linalg.roots import inverse_sqrt

__all__ = [
    "QuadraticSolution",
    "augmented_polar",
    "inverse_sqrt",
    "nuclear_norm",
    "operator_norm",
    "polar",
    "project_operator_ball",
    "quadratic_projection",
    "residual",
]
