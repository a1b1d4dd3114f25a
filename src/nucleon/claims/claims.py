"""All claims of the paper, and ours beside them."""

from collections.abc import Mapping
from types import MappingProxyType

from nucleon.claims.applications import app_quasi_newton, app_rotations, app_training
from nucleon.claims.engine import Claim
from nucleon.claims.games import (
    ftl_linear,
    high_probability,
    lemma_decomposition,
    lemma_discounting,
    remark_unknown_bound,
    tab_adagrad,
    tab_shampoo,
    thm_faml,
    thm_ftpl,
    thm_gbpa,
    tightness,
)
from nucleon.claims.inequalities import (
    lemmas_shampoo,
    lemmas_wishart,
    prop_admissibility,
    prop_tradeoff,
)
from nucleon.claims.processes import (
    average_schedule,
    fig_ripples,
    o2nc,
    thm_average,
    thm_leon,
    thm_pion,
)
from nucleon.claims.timing import cost_model, projection_cost

CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {
        module.CLAIM.id: module.CLAIM
        for module in (
            fig_ripples,
            ftl_linear,
            lemma_decomposition,
            thm_gbpa,
            prop_admissibility,
            prop_tradeoff,
            thm_ftpl,
            lemmas_wishart,
            high_probability,
            thm_faml,
            tightness,
            tab_shampoo,
            lemmas_shampoo,
            tab_adagrad,
            remark_unknown_bound,
            cost_model,
            projection_cost,
            lemma_discounting,
            o2nc,
            thm_pion,
            thm_leon,
            app_rotations,
            app_quasi_newton,
            app_training,
            thm_average,
            average_schedule,
        )
    }
)
"""All claims by id, in the order of the paper; ours come last."""
