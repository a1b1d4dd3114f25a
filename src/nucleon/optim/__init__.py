"""Muon, Pion and Leon: torch optimizers from online learning over the operator-norm ball."""

from nucleon.optim.adamw import AdamWOptions
from nucleon.optim.certify import CertificateLog
from nucleon.optim.checkpoints import consolidate
from nucleon.optim.conversion import ConversionMeter, ConversionTerms
from nucleon.optim.explanation import Explanation
from nucleon.optim.leon import Leon
from nucleon.optim.muon import Muon
from nucleon.optim.o2nc import O2NC
from nucleon.optim.options import Options, scale_factor
from nucleon.optim.pion import Pion
from nucleon.optim.planning import Estimates, Interval, Plan, estimate, plan
from nucleon.optim.qk_clip import QKClip
from nucleon.optim.registry import create, list_optimizers, register
from nucleon.optim.roles import Place, Role, register_module
from nucleon.optim.switching import convert, convert_checkpoint

__all__ = [
    "O2NC",
    "AdamWOptions",
    "CertificateLog",
    "ConversionMeter",
    "ConversionTerms",
    "Estimates",
    "Explanation",
    "Interval",
    "Leon",
    "Muon",
    "Options",
    "Pion",
    "Place",
    "Plan",
    "QKClip",
    "Role",
    "consolidate",
    "convert",
    "convert_checkpoint",
    "create",
    "estimate",
    "list_optimizers",
    "plan",
    "register",
    "register_module",
    "scale_factor",
]
