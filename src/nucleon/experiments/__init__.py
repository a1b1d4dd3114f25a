"""The claims of the paper, one file each, named like its id."""

from collections.abc import Mapping
from types import MappingProxyType

from nucleon.experiments import fig_ripples, o2nc, thm_leon, thm_pion
from nucleon.experiments.base import (
    Cell,
    Check,
    Claim,
    Figure,
    Panel,
    Progress,
    Result,
    Series,
    Settings,
    Silent,
    Table,
)

CLAIMS: Mapping[str, Claim] = MappingProxyType(
    {c.id: c for c in (o2nc.CLAIM, thm_pion.CLAIM, thm_leon.CLAIM, fig_ripples.CLAIM)}
)
"""All claims by id, in the order of the paper."""

__all__ = [
    "CLAIMS",
    "Cell",
    "Check",
    "Claim",
    "Figure",
    "Panel",
    "Progress",
    "Result",
    "Series",
    "Settings",
    "Silent",
    "Table",
]
