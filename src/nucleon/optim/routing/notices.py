"""What routing tells its user: short lists of names, and one override that serves all of each."""

from collections.abc import Mapping, Sequence

from nucleon.optim.matrices.parameters import globs
from nucleon.optim.routing.fused import parts
from nucleon.optim.routing.heads import Missed

MOST = 4
"""Names that a list shows."""


def unknown(kinds: Mapping[str, str], others: Sequence[str]) -> str:
    """Of parameters whose modules nobody knows.

    Args:
        kinds: of each parameter, by its name, the shape and the name of its module.
        others: the names of all other parameters, which the override is not to touch.
    """
    said = [f"{name} ({kind})" for name, kind in kinds.items()]
    serves = dict.fromkeys(globs([*kinds], others), "adamw")
    return (
        f"the modules of these parameters are not known here: {_short(said)}; pass "
        f"overrides={serves}, with {{'axes': 'r c'}} or the like in place of 'adamw' for a matrix "
        f"that multiplies, or teach the module once with nucleon.optim.register_module"
    )


def unknown_order(fused: Sequence[tuple[str, str, str]], others: Sequence[str]) -> str:
    """Of weights that hold several maps in an order that nobody knows.

    Args:
        fused: the name of each, its axes as one matrix, and the word of its maps in turn.
        others: the names of all other parameters, which the override is not to touch.
    """
    names = [name for name, _, _ in fused]
    words = [word for _, _, word in fused]
    attends = all(parts(name) == 3 for name in names) and {*words} == {"(b=3 r)"}
    maps = "q, k, v" if attends else "the maps"
    sizes = ["write the sizes for SIZES"] if any("SIZES" in word for word in words) else []
    order = ", or ".join(dict.fromkeys(_order(word) for word in words))
    ways = {"; ".join([f"{maps} {order}", *sizes]): words}
    if any(word.startswith("(b=") for word in words):
        meaning = f"head by head, in each {maps}; write the number for HEADS"
        ways[meaning] = [word.replace("(b=", "(r=HEADS b=") for word in words]
    ways["one matrix, without this warning"] = ["r"] * len(words)
    lines: list[str] = []
    for meaning, chosen in ways.items():
        wanted: dict[str, list[str]] = {}
        for (name, whole, _), word in zip(fused, chosen, strict=True):
            wanted.setdefault(whole.replace("r", word), []).append(name)
        serves = {
            glob: {"axes": axes}
            for axes, same in wanted.items()
            for glob in globs(same, [*others, *(name for name in names if name not in same)])
        }
        lines.append(f"  overrides={serves}  # {meaning}")
    start = "stepped as one matrix, as the order of the maps in it is not known: "
    return "\n".join([f"{start}{_short(names)}; pass one of", *lines])


def _order(word: str) -> str:
    """How maps of this word lie in a weight."""
    if word.startswith("(r="):
        return "head by head, as the code cuts each"
    if word.startswith("(r "):
        return "row by row in turn, as x[..., ::2] takes one of two"
    return "one after the other, as x.chunk or x.split cuts them"


def no_head(missed: Missed) -> str:
    """Of heads that were not found: of all, or of some that stand beside one that was."""
    every = [*missed.known, *missed.names]  # as what is passed takes the place of what was found
    named = repr(every if len(every) > 1 else every[0])
    last, one = _short(missed.names), len(missed.names) == 1
    verb = "is stepped as a matrix" if one else "are stepped as matrices"
    if missed.known:
        seem = "seems" if one else "seem"
        return (
            f"{last} {seem} to end the network beside or after the output head that was found, "
            f"{_short(missed.known)}, and {verb}; pass head={named} to give all to AdamW, or head= "
            f"with those that are heads"
        )
    if missed.inner:
        return (
            f"no output head was found; the model seems to have none, as its last layer, {last}, "
            f"is as wide as those within, and it {verb}; pass head=None to say so, or head=NAME, "
            f"a glob over module names, to give a head to AdamW"
        )
    return (
        f"no output head was found, and {last} {verb}; pass head={named}, or other globs over "
        f"module names, to give the head to AdamW, or head=None if there is none"
    )


def doubtful_heads(names: Sequence[str]) -> str:
    """Of layers with the name of a head whose output later layers may take."""
    one = len(names) == 1
    said = "has the name of an output head" if one else "have the names of output heads"
    rest = "gives, and is stepped as a matrix" if one else "give, and are stepped as matrices"
    head, matrix = ({f"{name}.weight": route for name in names} for route in ("adamw", "matrix"))
    return (
        f"{_short(names)} {said}, but a later layer takes as many numbers as it {rest}; pass "
        f"overrides={head} if it is one, or {matrix} if not"
    )


def _short(said: Sequence[str]) -> str:
    more = f" and {len(said) - MOST} more" if len(said) > MOST else ""
    return ", ".join(said[:MOST]) + more
