"""Cuts that a module's code makes in what its children give: which weights hold several maps.

No name and no size tells that `a, b, c = self.project(x).chunk(3, -1)` has three maps in one
weight. The source does. It is read, not run: what a child gives is followed through names, views
and transpositions to where it is cut along its features. What is cut and joined again, as by a
rotary embedding, is one map. Where there is no source, nothing is found.
"""

import ast
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from weakref import WeakKeyDictionary, ref

from torch import nn

from nucleon.optim.routing import flows, fused
from nucleon.optim.routing.flows import Child, Cut, Flow
from nucleon.optim.routing.reader import Reader


@dataclass(frozen=True)
class Reading:
    """What the code of a module does with what its children give."""

    cuts: Mapping[str, Cut]
    """Those that are taken apart, by their paths."""
    gives: frozenset[str] = frozenset()
    """Those whose output is that of the module."""
    rests_on: tuple[tuple[ast.expr, int | None], ...] = ()
    """The numbers of the module that were asked for, as `self.dim`, and what they were."""


_READ: "WeakKeyDictionary[type, dict[object, list[Reading]]]" = WeakKeyDictionary()


def reading(module: nn.Module | None) -> Reading:
    """What is read in a module, once for all of its like."""
    if module is None or type(module).__module__.startswith("torch."):  # a list, a Sequential
        return Reading({})
    alike = _READ.setdefault(type(module), {}).setdefault(_within(module), [])
    for found in alike:
        if all(flows.number(node, module) == was for node, was in found.rests_on):
            return found
    try:
        alike.append(read(module))
    except Exception:  # advice on code of any kind is no reason to stop a run
        alike.append(Reading({}))
    return alike[-1]


def _within(module: nn.Module, depth: int = 2) -> tuple[object, ...]:
    """The modules within by what the reading sees of them; their types are not held."""
    return tuple(
        (name, ref(type(child)), _channels(child), depth > 1 and _within(child, depth - 1))
        for name, child in module._modules.items()
        if child is not None
    )


def _channels(module: nn.Module) -> tuple[int | None, ...]:
    """What tells a convolution of each channel by itself."""
    found = (module.__dict__.get(name) for name in ("groups", "in_channels"))
    return tuple(each if type(each) is int else None for each in found)


def word(cut: Cut, parent: nn.Module, rows: int) -> str:
    """The word of the output axis if the parts lie one after the other, in all or in each head."""
    with suppress(Exception):  # as above
        if cut.sizes is not None:
            sizes = [flows.number(node, parent) or 0 for node in cut.sizes]
            if min(sizes) > 0 and rows % sum(sizes) == 0:
                return fused.in_sections(sizes, rows)
        elif cut.parts and rows % cut.parts == 0 and not cut.is_sliced:
            return f"(b={cut.parts} r)"
        elif cut.seen == {"::2", "1::2"} or cut.seen == {"0::2", "1::2"}:
            return "(r b=2)"
    return "r{SIZES}"


def read(module: nn.Module) -> Reading:
    """Follow the methods of a module that use its children."""
    reader = Reader(module)
    given = reader.follow(type(module).forward, [Child("")], {})
    for method in _methods(type(module), {*module._modules}):
        reader.follow(method, [Child("")], {})
    found = [cut for cut in reader.cuts.values() if cut.holds and _is_sure(cut, reader)]
    cuts = {name: cut for cut in reversed(found) for name in cut.source.names}
    gives = frozenset[str]()
    if isinstance(given, Flow) and given.loose and given.axes[-1] != flows.OTHER:
        gives = given.names  # features at the end, where its user takes them
    return Reading(cuts, gives, (*reader.numbers,))


def _is_sure(cut: Cut, reader: Reader) -> bool:
    """Whether it is features that are cut, where it may be tokens: the parts add up to them."""
    if cut.marks is None:
        return True
    sizes = [reader.number(node) or 0 for node in cut.marks]
    if cut.seen:  # slices, from where they start, of one size: a class token is no such part
        sizes = [max(sizes) // (len(cut.seen) - 1)] * len(cut.seen)
    elif cut.sizes is None:
        sizes *= cut.parts or 0
    rows = {reader.number(flows.attribute(f"{name}.out_features")) for name in cut.source.names}
    return rows == {sum(sizes)}


def _methods(cls: type, children: set[str]) -> list[FunctionType]:
    """The methods that name a child; those that are overridden where `super()` may call them."""
    found: list[FunctionType] = []
    hidden = {"__init__"}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, method in vars(base).items():
            if isinstance(method, FunctionType) and name not in hidden:
                words = {*inspect.unwrap(method).__code__.co_names}
                found += [method] if words & children else []
                hidden |= set() if "super" in words else {name}
    return found
