"""The claims of the paper, one file each, named like its id."""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
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
    from nucleon.experiments.claims import CLAIMS

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

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "base": "Cell Check Claim Figure Panel Progress Result Series Settings Silent Table",
        "claims": "CLAIMS",
    },
)
