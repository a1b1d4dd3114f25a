"""Muon, Pion and Leon: torch optimizers from online learning over the operator-norm ball."""

from nucleon.optim.certify import CertificateLog
from nucleon.optim.leon import Leon
from nucleon.optim.muon import Muon
from nucleon.optim.options import Options, scale_factor
from nucleon.optim.pion import Pion

__all__ = ["CertificateLog", "Leon", "Muon", "Options", "Pion", "scale_factor"]
