"""All claims of the paper."""

from collections.abc import Mapping
from types import MappingProxyType

from nucleon.experiments import (
    app_quasi_newton,
    app_rotations,
    app_training,
    cost_model,
    fig_ripples,
    ftl_linear,
    high_probability,
    lemma_decomposition,
    lemma_discounting,
    lemmas_shampoo,
    lemmas_wishart,
    o2nc,
    projection_cost,
    prop_admissibility,
    prop_tradeoff,
    remark_unknown_bound,
    tab_adagrad,
    tab_shampoo,
    thm_faml,
    thm_ftpl,
    thm_gbpa,
    thm_leon,
    thm_pion,
    tightness,
)
from nucleon.experiments.base import Claim

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
        )
    }
)
"""All claims by id, in the order of the paper."""
