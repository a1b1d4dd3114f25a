"""A claim that measures and assembles its result by itself."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nucleon.claims.engine import (
    Check,
    Progress,
    Relation,
    Result,
    Settings,
    Silent,
    least,
    one_thread,
    worst,
)

__all__ = [
    "Check",
    "Claim",
    "Progress",
    "Relation",
    "Result",
    "Settings",
    "Silent",
    "least",
    "one_thread",
    "worst",
]


@dataclass(frozen=True)
class Claim:
    """One claim of the paper and how it is checked, with a `run` of its own."""

    id: str
    title: str
    statement: str
    place: str
    tolerance: str
    run: Callable[[Settings, Progress], Result] = field(repr=False)
    seconds: float
    quick_seconds: float
    alone: bool = False

    def expected(self, quick: bool) -> float:
        """Return about how many seconds a run takes."""
        return self.quick_seconds if quick else self.seconds
