"""The table of faults, and the way to plant one.

A fault puts a wrong function in the place of one of the imported library. `claims` are those that
must notice, by a check that fails with `--quick`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

PATCH = pytest.MonkeyPatch()


class Fault(NamedTuple):
    name: str
    claims: tuple[str, ...]
    put_in: Callable[[], None]


FAULTS: list[Fault] = []
Place = tuple[object, str]
"""A module or a class, and the name of a function or a property of it."""


def fault(name: str, claims: str, *places: Place):
    """Enter a fault: at the places the decorated function, which gets the exact one first.

    Without places the decorated function plants the fault itself.
    """

    def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
        put_in = partial(plant, wrong, *places) if places else wrong
        FAULTS.append(Fault(name, tuple(claims.split()), put_in))
        return wrong

    return enter


def plant(wrong: Callable[..., Any], *places: Place) -> None:
    """Put wrong(exact, …) in each place."""
    for owner, name in places:
        exact = getattr(owner, name)
        is_property = isinstance(exact, property)
        changed = _with_exact(wrong, exact.fget if is_property else exact)
        PATCH.setattr(owner, name, property(changed) if is_property else changed)


def _with_exact(wrong: Callable[..., Any], exact: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: wrong(exact, *arguments, **options)


def times(factor: float) -> Callable[..., Any]:
    """Return a function that multiplies what the exact one returns."""
    return lambda exact, *arguments, **options: factor * exact(*arguments, **options)


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault for a while."""
    (chosen,) = (f for f in FAULTS if f.name == name)
    try:
        chosen.put_in()
        yield
    finally:
        PATCH.undo()
