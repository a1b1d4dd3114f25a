"""Bounds, complexities and lemmas of the paper, and ours, as plain functions.

Imports `nucleon.certificate`, `online.metric` and torch.
"""

from nucleon.certificate import ftpl_constants, gbpa_bound, preconditioner_trace
from nucleon.online.theory.adagrad import (
    adagrad_bound,
    adagrad_trace,
    gaussian_ftpl_constants,
    scale_free_adagrad_bound,
)
from nucleon.online.theory.averages import (
    average_constant_rate_bound,
    average_distance_bound,
    average_falling_rate_bound,
    average_weights,
)
from nucleon.online.theory.concentration import ftpl_adaptive_deviation, ftpl_oblivious_deviation
from nucleon.online.theory.costs import augmented_flops, coupled_flops, ftpl_flops, polar_flops
from nucleon.online.theory.gbpa import (
    bregman_bound,
    faml_bound,
    ftpl_bound,
    ftpl_factor,
    scalar_gbpa_bound,
    spectral_excess,
    stability_bound,
)
from nucleon.online.theory.lemmas import (
    Sides,
    admissibility_tradeoff,
    full_against_scalar,
    inverse_chi_square,
    inverse_wishart,
    loss_decomposition,
    matrix_potential,
    mirror_descent_regret,
    nuclear_hessian,
    shampoo_distance_term,
    shampoo_gradient_term,
)
from nucleon.online.theory.nonconvex import (
    Complexity,
    ConversionBound,
    ewa_distance_bound,
    ewa_weights,
    leon_complexity,
    o2nc_bound,
    o2nc_radius,
    pion_complexity,
    stationarity_bound,
    tau_law,
)
from nucleon.online.theory.shampoo import (
    one_sided_shampoo_bound,
    original_shampoo_bound,
    shampoo_bound,
)

__all__ = [
    "Complexity",
    "ConversionBound",
    "Sides",
    "adagrad_bound",
    "adagrad_trace",
    "admissibility_tradeoff",
    "augmented_flops",
    "average_constant_rate_bound",
    "average_distance_bound",
    "average_falling_rate_bound",
    "average_weights",
    "bregman_bound",
    "coupled_flops",
    "ewa_distance_bound",
    "ewa_weights",
    "faml_bound",
    "ftpl_adaptive_deviation",
    "ftpl_bound",
    "ftpl_constants",
    "ftpl_factor",
    "ftpl_flops",
    "ftpl_oblivious_deviation",
    "full_against_scalar",
    "gaussian_ftpl_constants",
    "gbpa_bound",
    "inverse_chi_square",
    "inverse_wishart",
    "leon_complexity",
    "loss_decomposition",
    "matrix_potential",
    "mirror_descent_regret",
    "nuclear_hessian",
    "o2nc_bound",
    "o2nc_radius",
    "one_sided_shampoo_bound",
    "original_shampoo_bound",
    "pion_complexity",
    "polar_flops",
    "preconditioner_trace",
    "scalar_gbpa_bound",
    "scale_free_adagrad_bound",
    "shampoo_bound",
    "shampoo_distance_term",
    "shampoo_gradient_term",
    "spectral_excess",
    "stability_bound",
    "stationarity_bound",
    "tau_law",
]
