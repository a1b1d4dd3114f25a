"""All claims of the paper, and ours beside them."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from nucleon.claims.engine import Claim

FILES = """
processes.fig_ripples games.ftl_linear games.lemma_decomposition games.thm_gbpa
inequalities.prop_admissibility inequalities.prop_tradeoff games.thm_ftpl
inequalities.lemmas_wishart games.high_probability games.thm_faml games.tightness
games.tab_shampoo inequalities.lemmas_shampoo games.tab_adagrad games.remark_unknown_bound
timing.cost_model timing.projection_cost games.lemma_discounting processes.o2nc processes.thm_pion
processes.thm_leon applications.app_rotations applications.app_quasi_newton
applications.app_training processes.thm_average processes.average_schedule
"""
"""Files of this folder, in the order of the paper; ours come last."""

_claims: list[Claim] = [import_module(f"nucleon.claims.{file}").CLAIM for file in FILES.split()]
CLAIMS: Mapping[str, Claim] = MappingProxyType({claim.id: claim for claim in _claims})
"""All claims by id, in that order."""
