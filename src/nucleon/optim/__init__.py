"""Muon, Pion and Leon: torch optimizers from online learning over the operator-norm ball."""

from nucleon.optim.certify import CertificateLog
from nucleon.optim.conversion import ConversionMeter, ConversionTerms
from nucleon.optim.leon import Leon
from nucleon.optim.muon import Muon
from nucleon.optim.o2nc import O2NC
from nucleon.optim.options import Options, scale_factor
from nucleon.optim.pion import Pion
from nucleon.optim.planning import Estimates, Interval, Plan, estimate, plan

__all__ = [
    "O2NC",
    "CertificateLog",
    "ConversionMeter",
    "ConversionTerms",
    "Estimates",
    "Interval",
    "Leon",
    "Muon",
    "Options",
    "Pion",
    "Plan",
    "estimate",
    "plan",
    "scale_factor",
]
