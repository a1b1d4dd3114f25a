"""What routing tells its user: short lists of names, and one override that serves all of each."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from nucleon.optim.routing.heads import Missed

MOST = 4
"""Names that a list shows."""


def unknown(names: Sequence[str], kinds: Iterable[str], others: Sequence[str]) -> str:
    """Of parameters whose modules nobody knows.

    Args:
        names: of the parameters.
        kinds: a shape and the name of a module for each.
        others: the names of all other parameters, which the override is not to touch.
    """
    said = [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True)]
    return (
        f"the modules of these parameters are not known here: {_short(said)}; pass "
        f"overrides={_overrides(names, others, 'adamw')}, with {{'axes': 'r c'}} or the like in "
        f"place of 'adamw' for a matrix that multiplies, or teach the module once with "
        f"nucleon.optim.register_module"
    )


def unknown_order(names: Sequence[str], others: Sequence[str], whole: str, parts: int) -> str:
    """Of weights that hold several maps in an order that nobody knows.

    Args:
        names: of the parameters.
        others: the names of all other parameters, which the override is not to touch.
        whole: the axes of the first as one matrix.
        parts: how many maps it seems to hold.
    """
    maps = "q, k, v" if parts == 3 else "two maps"
    ways = {
        f"{maps} one after the other, as x.chunk({parts}) cuts them": f"(b={parts} r)",
        f"head by head, in each {maps}; write the number for HEADS": f"(r=HEADS b={parts} r)",
        "one matrix, without this warning": "r",
    }
    lines = [
        f"  overrides={_overrides(names, others, {'axes': whole.replace('r', word)})}  # {meaning}"
        for meaning, word in ways.items()
    ]
    start = "stepped as one matrix, as the order of the maps in it is not known: "
    return "\n".join([f"{start}{_short(names)}; pass one of", *lines])


def no_head(missed: Missed) -> str:
    """Of heads that were not found: of all, or of some that stand beside one that was."""
    named = repr(missed.names if len(missed.names) > 1 else missed.names[0])
    last = _short(missed.names)
    if missed.some:
        return (
            f"of {last}, which seem to end the network side by side, not all are named as output "
            f"heads, and the others are stepped as matrices; pass head={named} to give all to "
            f"AdamW, or head= with those that are heads"
        )
    verb = "are stepped as matrices" if len(missed.names) > 1 else "is stepped as a matrix"
    if missed.inner:
        return (
            f"no output head was found, and the model seems to have none, as its last layer, "
            f"{last}, is as wide as what is within, and {verb}; pass head=None to say so, or "
            f"head=NAME, a glob over module names, to give a head to AdamW"
        )
    return (
        f"no output head was found, and {last} {verb}; pass head={named}, or other globs over "
        f"module names, to give the head to AdamW, or head=None if there is none"
    )


def globs(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Few globs that match all of `names` and none of `others`."""
    found: list[str] = []
    for name in names:
        if not any(fnmatchcase(name, glob) for glob in found):
            found.append(_glob(name, others))
    return found


def _glob(name: str, others: Sequence[str]) -> str:
    """The shortest end of a name that no other has, layers by any number."""
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    for count in range(1, len(parts) + 1):
        glob = "*" + ".".join(parts[-count:]).removeprefix("*")
        if not any(fnmatchcase(other, glob) for other in others):
            return glob
    return name


def _overrides(names: Sequence[str], others: Sequence[str], wish: object) -> str:
    return repr(dict.fromkeys(globs(names, others), wish))


def _short(said: Sequence[str]) -> str:
    more = f" and {len(said) - MOST} more" if len(said) > MOST else ""
    return ", ".join(said[:MOST]) + more
