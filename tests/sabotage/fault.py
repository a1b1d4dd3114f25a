"""What a fault is, and the table of them.

A fault is a function that patches the imported library, for good: it runs in a process of its own.
`claims` are those that must notice, by a check that fails, with `--quick`. `issue` marks the faults
that every claim once let pass; `internal` those whose patch depends on a private name.
"""

from collections.abc import Callable
from typing import NamedTuple


class Fault(NamedTuple):
    name: str
    claims: tuple[str, ...]
    put_in: Callable[[], None]
    issue: bool
    internal: bool
    breaks: bool


FAULTS: list[Fault] = []


def fault(
    name: str, *claims: str, issue: bool = False, internal: bool = False, breaks: bool = False
):
    """Enter a fault; `breaks` says that the claims notice by an exception, not by a check."""

    def enter(put_in: Callable[[], None]) -> Callable[[], None]:
        FAULTS.append(Fault(name, claims, put_in, issue, internal, breaks))
        return put_in

    return enter


def replace(function_of, name: str, change) -> None:
    """Put change(original) in the place of an attribute."""
    setattr(function_of, name, change(getattr(function_of, name)))
