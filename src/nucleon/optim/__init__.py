"""Muon, Pion and Leon: torch optimizers from online learning over the operator-norm ball.

Imports `nucleon.linalg` and the shared modules (`noise`, `moments`, `certificate`), never
`nucleon.online` or `nucleon.claims`.
"""

from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.checkpoints import consolidate
from nucleon.optim.convert import converted
from nucleon.optim.engines.ranks.agreement import check_ranks
from nucleon.optim.engines.work import Context, Draws, of_potential
from nucleon.optim.leon import Leon, LeonOptions
from nucleon.optim.muon import Muon, MuonOptions
from nucleon.optim.options import AdamWOptions, Options, scale_factor
from nucleon.optim.pion import Pion, PionOptions
from nucleon.optim.qk_clip import QKClip
from nucleon.optim.registry import OPTIMIZERS, create
from nucleon.optim.routing.explanation import Explanation
from nucleon.optim.routing.places import Place, Role
from nucleon.optim.routing.roles import register_module
from nucleon.optim.routing.routing import param_groups

__all__ = [
    "OPTIMIZERS",
    "AdamWOptions",
    "Context",
    "Draws",
    "Explanation",
    "Leon",
    "LeonOptions",
    "MatrixOptimizer",
    "Muon",
    "MuonOptions",
    "Options",
    "Pion",
    "PionOptions",
    "Place",
    "QKClip",
    "Role",
    "check_ranks",
    "consolidate",
    "converted",
    "create",
    "of_potential",
    "param_groups",
    "register_module",
    "scale_factor",
]
