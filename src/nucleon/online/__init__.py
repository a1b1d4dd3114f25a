"""Online learning over the operator-norm ball: learners, streams, regret and its bounds.

Imports `nucleon.linalg` and the shared modules; of `nucleon.optim` only constants of the noise.
"""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon.online import (
        admissibility,
        adversary,
        learners,
        o2nc,
        potentials,
        problems,
        regret,
        stationarity,
        streams,
        theory,
    )
    from nucleon.online.game import Trace, play
    from nucleon.online.learners import FAML, FTL, FTPL, FTRL, Learner
    from nucleon.online.o2nc import O2NC, estimate, plan

__all__ = [
    "FAML",
    "FTL",
    "FTPL",
    "FTRL",
    "O2NC",
    "Learner",
    "Trace",
    "admissibility",
    "adversary",
    "estimate",
    "learners",
    "o2nc",
    "plan",
    "play",
    "potentials",
    "problems",
    "regret",
    "stationarity",
    "streams",
    "theory",
]

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "game": "play Trace",
        "learners": "FAML FTL FTPL FTRL Learner",
        "o2nc": "O2NC estimate plan",
    },
)
