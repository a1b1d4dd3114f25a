"""The online-to-nonconvex conversion: any learner as an optimizer, its meter and its plan.

Imports learners and theory; of `nucleon.optim` constants of the noise.
"""

from nucleon.online.o2nc.meter import ConversionMeter, ConversionTerms
from nucleon.online.o2nc.optimizer import O2NC
from nucleon.online.o2nc.plans import Estimates, Interval, Plan, estimate, plan

__all__ = [
    "O2NC",
    "ConversionMeter",
    "ConversionTerms",
    "Estimates",
    "Interval",
    "Plan",
    "estimate",
    "plan",
]
