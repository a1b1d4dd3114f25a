"""Appendix B: Table 2 by hand and against the oracle; the learners' tests play it."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleon.claims.oracle import bounds
from nucleon.online import theory

MOMENT = torch.tensor([9.0, 16.0, 0.0, 144.0], dtype=torch.float64)  # √sum 13, sum of roots 19
TRACE = {"scalar": 13.0, "diagonal": 19.0, "full": 19.0}


@pytest.mark.parametrize("preconditioner", ["scalar", "diagonal", "full"])
@pytest.mark.parametrize("update", ["ogd", "ftrl", "proximal"])
@pytest.mark.parametrize("ball", ["l2", "linf"])
def test_table_two_by_hand(preconditioner, update, ball):
    moment = MOMENT.diag() if preconditioner == "full" else MOMENT
    inner, euclidean = 3.0, 3.0 * (2.0 if ball == "linf" else 1.0)  # √d = 2
    if preconditioner != "diagonal":
        inner = euclidean
    reach = {"ftrl": 1}.get(update, 2)
    shared = {"preconditioner": preconditioner, "update": update, "ball": ball, "radius": 3.0}
    trace = TRACE[preconditioner]
    optimal = theory.adagrad_bound(moment, **shared).item()
    assert optimal == pytest.approx(math.sqrt(2) * reach * inner * trace)
    general = theory.adagrad_bound(moment, eta=0.5, delta=0.7, excess=0.1, **shared).item()
    by_hand = ((reach * inner) ** 2 + 0.5) * trace + 0.7 * (reach * euclidean) ** 2
    assert general == pytest.approx(by_hand + 2 * inner * 0.1)
    assert optimal <= theory.adagrad_bound(moment, eta=0.5, **shared).item()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 5), rounds=st.integers(1, 8))
def test_remark_b2(seed, d, rounds):
    gradients = np.random.default_rng(seed).standard_normal((rounds, d))
    left, right = theory.full_against_scalar(torch.from_numpy(gradients.T @ gradients))
    assert left.item() == pytest.approx(np.linalg.norm(gradients), rel=1e-12)
    singular = np.linalg.svd(gradients, compute_uv=False).sum()  # Tr √(AᵀA) = ‖A‖_*
    # eigenvalues of a rank-deficient Gram are ±1e-15, their roots 3e-8 each
    assert right.item() == pytest.approx(singular, abs=1e-6)
    assert left <= right * (1 + 1e-12)


@pytest.mark.parametrize("d", [2, 3, 10, 1000])
def test_gaussian_constants_are_moments_of_chi(d):
    alpha, beta = theory.gaussian_ftpl_constants(d)
    law = scipy.stats.chi(d)
    assert alpha == pytest.approx(law.mean(), rel=1e-9)
    center = law.mean()
    inverse, _ = scipy.integrate.quad(
        lambda y: law.pdf(y) / y, 0, center + 12, points=[center], limit=200
    )
    assert beta == pytest.approx(inverse, rel=1e-6)
    loose = theory.ftpl_constants(1, d)[1] if d >= 3 else math.inf
    assert beta < loose and alpha * beta > 1


@pytest.mark.parametrize("d", [2, 3, 7])
def test_the_gaussian_bound_is_theorem_3_2_on_a_row(d):
    gradients = np.random.default_rng(4).standard_normal((20, 1, d))
    level = float(np.linalg.norm(gradients, axis=-1).max())
    bound = theory.gaussian_ftpl_bound(
        torch.tensor(float((gradients**2).sum())),
        dimension=d,
        radius=1.0,
        gradient_bound=level,
        first_norm=float(np.linalg.norm(gradients[0])),
    )
    expected = bounds.gbpa(gradients, bounds.spherical(d), radius=1.0, bound=level)
    assert bound.item() == pytest.approx(expected, rel=1e-6)  # the sum of squares is float32
