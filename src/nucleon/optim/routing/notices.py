"""Messages of routing to the user: short lists of names, and overrides to paste."""

from collections.abc import Mapping, Sequence
from typing import Any

from nucleon.optim.matrices.parameters import globs
from nucleon.optim.routing.places import Parameter

MOST = 4
"""Names that a list shows."""
GRAMMAR = (
    "Of axes, r are outputs, c inputs and b count matrices, see nucleon.optim.matrices.axes; a "
    "class is taught once with nucleon.optim.register_module."
)


def unknown(parameters: Sequence[Parameter], every: Sequence[Parameter]) -> str:
    """Return the error on parameters of unknown modules.

    Args:
        parameters: the unknown parameters.
        every: all parameters of the model, of which an override must match no other.
    """
    listed = [
        f"{p.name} ({'×'.join(map(str, p.param.shape))}, {p.places[0].kind})" for p in parameters
    ]
    linear = {p.name: {"axes": _axes(p.param.ndim, "r", "c")} for p in parameters}
    crosswise = {p.name: {"axes": _axes(p.param.ndim, "c", "r")} for p in parameters}
    lines = [
        _line(linear, every, "matrices of (outputs, inputs), as in F.linear(x, W) = x @ W.T"),
        _line(crosswise, every, "matrices of (inputs, outputs), as in x @ W"),
        _line({p.name: "adamw" for p in parameters}, every, "no matrices: looked up or added"),
    ]
    start = f"the modules of these parameters are not known here: {_short(listed)}; pass one of"
    return "\n".join([start, *lines, GRAMMAR])


def _axes(ndim: int, first: str, second: str) -> str:
    """Return the axes of a weight, of a stack of weights, or of a weight with taps."""
    return f"b {first} {second}" if ndim == 3 else " ".join([first, second, *(ndim - 2) * "c"])


def ambiguous(parameters: Sequence[Parameter], every: Sequence[Parameter]) -> str:
    """Return the warning about weights of unknown layout.

    Args:
        parameters: weights with `layouts`, each treated as one matrix.
        every: all parameters of the model, of which an override must match no other.
    """
    ways: dict[str, dict[str, Any]] = {
        "one matrix, without this warning": {p.name: {"axes": p.axes} for p in parameters}
    }
    for parameter in parameters:
        for meaning, axes in (parameter.layouts or {}).items():
            ways.setdefault(meaning, {})[parameter.name] = {"axes": axes}
    lines = [_line(values, every, meaning) for meaning, values in ways.items()]
    start = "stepped as one matrix, though it holds several by its name, in a layout not known here"
    listed = _short([p.name for p in parameters])
    return "\n".join([f"{start}: {listed}; pass one of", *lines, GRAMMAR])


def _line(values: Mapping[str, Any], every: Sequence[Parameter], meaning: str) -> str:
    """Return an override that assigns these values, and matches no other parameter."""
    same: dict[str, list[str]] = {}
    for name, value in values.items():
        same.setdefault(repr(value), []).append(name)
    overrides = {
        glob: values[names[0]]
        for names in same.values()
        for glob in globs(names, [n for p in every if p.name not in names for n in p.names])
    }
    return f"  overrides={overrides}  # {meaning}"


def no_head(name: str) -> str:
    """Return the warning about a model without a known output head, whose last map is `name`."""
    return (
        f"no output head was found, and {name}, the last map of the model, is stepped as a matrix; "
        f"pass head={name!r}, or another glob over module names, to give the head to AdamW, or "
        f"head=None if there is none"
    )


def _short(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
