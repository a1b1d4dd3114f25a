"""The claims of the paper and our own, one file each, named like its id.

Imports from the whole library but `report` and `cli`.
"""

from typing import TYPE_CHECKING

from nucleon import _lazy

if TYPE_CHECKING:
    from nucleon.claims.claims import CLAIMS
    from nucleon.claims.engine import Check, Claim, Progress, Result, Settings
    from nucleon.claims.shown import Cell, Figure, Panel, Series, Table

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
    "Table",
]

__getattr__, __dir__ = _lazy.attach(
    __name__,
    __all__,
    {
        "engine": "Check Claim Progress Result Settings",
        "claims": "CLAIMS",
        "shown": "Cell Figure Panel Series Table",
    },
)
