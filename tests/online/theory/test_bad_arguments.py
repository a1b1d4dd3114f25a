"""Arguments that the functions of the theory refuse, by name."""

import math
from functools import partial

import pytest
import torch

from nucleon.online import theory

EYE, ONES, NORMS = torch.eye(2), torch.ones(2, 3), torch.ones(3)
SAMPLES = {"radius": 1.0, "samples": 4, "delta": 0.1}


def gbpa(**change):
    usual = {"radius": 1.0, "gradient_bound": 1.0, "alpha": 1.0, "beta": 1.0, "first_nuclear": 1.0}
    theory.gbpa_bound(**{"gram": EYE, **usual, **change})


def adagrad(**change):
    usual = {"preconditioner": "scalar", "update": "ogd", "ball": "l2", "radius": 1.0}
    theory.adagrad_bound(**{"moment": NORMS, **usual, **change})


def plan(function=theory.leon_complexity, **change):
    usual = {"rho": 0.5, "epsilon": 0.1, "q_nuclear": 3.0, "loss_gap": 2.0, "gradient_bound": 1.0}
    function(**{"rows": 4, **usual, **change})


def deviations(**change):
    options = {**SAMPLES, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        theory.ftpl_adaptive_deviation(NORMS, rows=1, columns=1, **options)
    theory.ftpl_oblivious_deviation(NORMS, **options)


REFUSED = [
    (partial(gbpa, radius=0.0), "radius must be"),
    (partial(gbpa, gradient_bound=-1.0), "gradient_bound must be"),
    (partial(gbpa, gradient_bound=torch.ones(5)), "gradient_bound does not broadcast"),
    (partial(gbpa, alpha=0.1), "Proposition 3.3"),
    (partial(gbpa, eta=-1.0), "eta must be"),
    (partial(gbpa, discount=1.5), "discount must lie"),
    (partial(gbpa, discount=0.5), "rounds is needed"),
    (partial(gbpa, first_nuclear=math.nan), "first_nuclear must be"),
    (partial(gbpa, excess=-1.0), "excess must be"),
    (partial(gbpa, gram=torch.tensor([[1.0, 2], [0, 1]])), "gram must be symmetric"),
    (partial(theory.ftpl_constants, 4, 5), "pad with zero columns"),
    (partial(theory.ftpl_bound, EYE, width=3, radius=1, gradient_bound=1), "pad with zero columns"),
    (partial(theory.bregman_bound, ONES, 0 * EYE, beta=1.0), "positive definite"),
    (
        partial(theory.shampoo_bound, EYE.expand(3, 2, 2), EYE.expand(2, 2, 2), radius=1.0),
        "column_gram",
    ),
    (partial(theory.one_sided_shampoo_bound, EYE, radius=1.0, epsilon=-1.0), "epsilon"),
    (partial(theory.original_shampoo_bound, EYE, EYE, radius=1.0, rank=0), "rank"),
    (partial(plan, epsilon=61.0), "already stationary"),
    (partial(plan, rho=-1.0), "rho"),
    (partial(plan, q_nuclear=0.0), "q_nuclear"),
    (partial(plan, loss_gap=-1.0), "loss_gap"),
    (partial(plan, rows=0), "rows"),
    (partial(plan, theory.pion_complexity, width=4), "pad with zero columns"),
    (partial(theory.tau_law, 3, 0.0), "discount"),
    (partial(theory.o2nc_radius, rho=1.0, discount=1.0), "discount"),
    (partial(adagrad, preconditioner="block"), "preconditioner"),
    (partial(adagrad, update="adam"), "update"),
    (partial(adagrad, ball="l1"), "ball"),
    (partial(adagrad, delta=-0.1), "delta"),
    (partial(adagrad, moment=-NORMS), "moment must be ≥ 0"),
    (partial(theory.gaussian_ftpl_constants, 1), "dimension"),
    (partial(theory.average_weights, 0.6, 10), r"fraction must be in \(0, 0.5\], got 0.6"),
    (partial(deviations, delta=0.0), "delta"),
    (partial(deviations, samples=0), "samples"),
    (partial(theory.nuclear_hessian, ONES, ONES), "full row rank"),
    (partial(theory.inverse_chi_square, 2, 1.0), "degrees"),
    (partial(theory.inverse_wishart, torch.zeros(3, 4), torch.zeros(9, 3, 4)), r"m \+ 2 columns"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_bad_arguments_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
