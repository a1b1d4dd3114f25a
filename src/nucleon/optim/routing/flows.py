"""Tensors as code names them: which of their axes hold the features that a module gives.

The axes go through views, permutations and einops patterns; nothing is computed. A view that has
a plain number among its sizes, as `y.view(b, t, 3, heads, -1)`, gives maps an axis of their own.
"""

import ast
import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from torch import nn

FEATURES, OTHER = -1, 0
"""What an axis holds: features, something else, or so many maps where it is a number above 1."""


@dataclass(frozen=True)
class Flow:
    """A tensor on its way from the modules that give it."""

    names: frozenset[str] = frozenset()
    axes: tuple[int, ...] = ()
    """What each holds; none: the shape is not known."""
    loose: bool = False
    """Whether the number of leading axes is not known, as of a Linear, which takes any."""
    pieces: "frozenset[tuple[Cut, str]]" = frozenset()
    """The cuts that it comes from, and what it is of each."""

    def lost(self) -> "Flow":
        """The same with a shape that is not known."""
        return Flow(pieces=self.pieces)

    def shaped(self, axes: Sequence[int]) -> "Flow":
        """The same with these axes."""
        return replace(self, axes=tuple(axes), loose=False)

    def of_rank(self, rank: int) -> "Flow":
        """With so many axes, where their number was not known."""
        if not self.loose:
            return self
        behind = self.axes[self.axes.index(FEATURES) + 1 :]
        return self.shaped([*[OTHER] * (rank - 1 - len(behind)), FEATURES, *behind])

    def axis(self, dim: int | None) -> int | None:
        """The place of an axis, counted from the start; None if there is none."""
        if dim is None:
            return None
        rank = len(self.axes)
        dim = min(dim, rank - 1) if self.loose else dim
        return dim % rank if -rank <= dim < rank else None


@dataclass(eq=False)
class Cut:
    """What a module gives, taken apart along its features."""

    source: Flow
    parts: int | None = None
    sizes: tuple[ast.expr, ...] | None = None
    """Of the parts, as the code has them; None: equal, or slices."""
    seen: set[str] = field(default_factory=set[str])
    """The slices and single entries that are taken, where it is not cut at once."""
    marks: list[ast.expr] | None = None
    """Where it may be tokens that are cut: the sizes of the parts, or where the slices start."""
    joined: bool = False
    """Whether the parts are put together again."""

    @property
    def holds(self) -> bool:
        """Whether there are several maps."""
        return not self.joined and len(self.seen) != 1 and self.parts != 1

    @property
    def is_sliced(self) -> bool:
        """Whether the sizes of the parts are in slices."""
        return any(":" in each for each in self.seen)

    def join(self, members: Sequence[set[str]], *, looped: bool) -> bool:
        """Whether tensors made of these parts are, side by side, all of them or first and last.

        Those of a loop are one member, which stands for each of them.
        """
        held = {part for member in members for part in member}
        first = any(re.match(r"0?:", each) for each in held)
        last = any(re.search(r":$|[1-9]::", each) for each in held)
        count = len(self.seen) if self.is_sliced else self.parts or 2
        several = len(members) > 1 and (len(held) >= max(2, count) or (first and last))
        whole = several or (looped and "None" in held)
        self.joined = self.joined or whole
        return whole


@dataclass(frozen=True)
class Child:
    """A module within, by its path; that of the one whose code is read is empty."""

    path: str


@dataclass(frozen=True)
class Several:
    """A tuple: of tensors, or the sizes of one."""

    items: "tuple[Value, ...]"
    nodes: tuple[ast.expr, ...] = ()


@dataclass(frozen=True)
class Pieces:
    """All that a cut gives, each of these axes."""

    cut: Cut
    axes: tuple[int, ...]

    def piece(self, place: int | None) -> Flow:
        """One of them; None: each in turn, as in a loop."""
        place = place + self.cut.parts if place and place < 0 and self.cut.parts else place
        return Flow(axes=self.axes, pieces=self.cut.source.pieces | {(self.cut, str(place))})


Value = Flow | Child | Several | Pieces | None


@dataclass(frozen=True)
class Given:
    """What an operation on a tensor is called with, beside the tensor."""

    nodes: Sequence[ast.expr]
    values: Sequence[Value]
    named: Mapping[str, tuple[ast.expr, Value]]
    known: Callable[[ast.expr], int | None]
    """The number that an expression is."""

    def node(self, place: int, *names: str) -> ast.expr | None:
        """An argument by its place or one of its names."""
        if place < len(self.nodes):
            return self.nodes[place]
        return next((self.named[name][0] for name in names if name in self.named), None)

    def number(self, place: int, name: str, default: int | None = None) -> int | None:
        """The same, where it is a number that can be known."""
        node = self.node(place, name, "axis")
        return default if node is None else self.known(node)

    def sizes(self, place: int, *names: str) -> list[ast.expr]:
        """A shape, as one tuple or number by number."""
        named = [self.named[name] for name in names if name in self.named]
        given = [*zip(self.nodes, self.values, strict=True)][place:] or named
        inner = [value.nodes if isinstance(value, Several) else (node,) for node, value in given]
        return [node for nodes in inner for node in nodes]


def tensors(values: Sequence[Value]) -> list[Flow]:
    """All tensors among them."""
    found: list[Flow] = []
    for value in values:
        match value:
            case Flow():
                found.append(value)
            case Several(items=items):
                found += tensors(items)
            case Pieces(cut=cut):
                found += [value.piece(place) for place in range(cut.parts or 2)]
            case _:
                pass
    return found


def mixed(values: Sequence[Value], *, summed: bool = False) -> Flow | None:
    """What comes of several: of parts of one cut their sum, as in a rotation, but no product."""
    found = tensors(values)
    held = frozenset(piece for flow in found for piece in flow.pieces)
    alone = held if summed else held - _beside(found)
    return Flow(pieces=alone) if alone else None


def _beside(found: Sequence[Flow]) -> set[tuple[Cut, str]]:
    """The parts that others of the same cut stand beside, in other tensors."""
    return {
        piece
        for flow in found
        for piece in flow.pieces
        for other in found
        if other is not flow and any(c is piece[0] and p != piece[1] for c, p in other.pieces)
    }


def joined(value: Value) -> Value:
    """Of a concatenation: all parts of a cut are what was cut."""
    held: dict[Cut, list[set[str]]] = {}
    for flow in tensors([value]):
        for found in {found for found, _ in flow.pieces}:
            places = {place for each, place in flow.pieces if each is found}
            held.setdefault(found, []).append(places)
    looped = not isinstance(value, Several) or len(value.items) == 1
    whole = [found for found, places in held.items() if found.join(places, looped=looped)]
    return whole[0].source if whole else mixed([value])


def is_part(index: ast.expr) -> bool:
    """Whether an index has a slice that leaves something out."""
    if isinstance(index, ast.Tuple):
        return any(is_part(each) for each in index.elts)
    return isinstance(index, ast.Slice) and any((index.lower, index.upper, index.step))


def either(values: Sequence[Value]) -> Value:
    """What a name is after a branch: the same of all children that it may come from."""
    known = [value for value in values if value is not None]
    first = known[0] if known else None
    if isinstance(first, Flow):
        same = [x for x in known if isinstance(x, Flow) and x.axes == first.axes]
        names = frozenset(name for flow in same for name in flow.names)
        pieces = frozenset(piece for flow in same for piece in flow.pieces)
        return replace(first, names=names, pieces=pieces)
    return first


def output(name: str, module: nn.Module) -> Flow:
    """What a map gives: channels behind the batch from a convolution, else features at the end."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    last = [inner for inner in module.modules() if isinstance(inner, kinds)][-1:]
    if last and not isinstance(last[0], nn.Linear):
        return Flow(frozenset({name}), (OTHER, FEATURES, *[OTHER] * len(last[0].kernel_size)))
    return Flow(frozenset({name}), (OTHER, OTHER, FEATURES), loose=True)


# ------------------------------------------------------------------------------ views and orders


def arranged(name: str, flow: Flow, given: Given) -> Flow | None:
    """A view or an order of the axes by the operation of this name; of any other only the cuts."""
    dim = flow.axis(given.number(0, "dim", 0))
    match name:
        case "rearrange" if isinstance(pattern := given.node(0, "pattern"), ast.Constant):
            sizes = {name: literal(node) for name, (node, _) in given.named.items()}
            return rearranged(flow, str(pattern.value), sizes)
        case "view" | "reshape":
            return viewed(flow, given.sizes(0, "shape"))
        case "unflatten" if dim is not None:
            return unflattened(flow, dim, given.sizes(1, "sizes", "unflattened_size"))
        case "flatten":
            start, end = given.number(0, "start_dim", 0), given.number(1, "end_dim", -1)
            return flattened(flow, flow.axis(start), flow.axis(end))
        case "permute":
            return permuted(flow, [literal(x) for x in given.sizes(0, "dims")])
        case "transpose" | "swapaxes" | "swapdims" | "t":
            dims = given.number(0, "dim0", 0), given.number(1, "dim1", 1)
            return moved(flow, *dims, swap=True)
        case "movedim" | "moveaxis":
            dims = given.number(0, "source"), given.number(1, "destination")
            return moved(flow, *dims, swap=False)
        case "unsqueeze" if (place := given.number(0, "dim")) is not None:
            start = place if place >= 0 else len(flow.axes) + 1 + place
            found = flow.shaped([*flow.axes[:start], OTHER, *flow.axes[start:]])
            return replace(found, loose=flow.loose and place == -1)
        case "squeeze" if given.nodes and dim is not None:
            return flow.shaped([*flow.axes[:dim], *flow.axes[dim + 1 :]])
        case _:
            return flow.lost() if flow.pieces else None


def viewed(flow: Flow, sizes: Sequence[ast.expr]) -> Flow:
    """`view` and `reshape`: features are at the end, or behind the batch as in a convolution."""
    given = [each for size in sizes for each in [size] * (1 + isinstance(size, ast.Starred))]
    if len(given) < 2 or not any(flow.axes):
        return flow.lost()
    labels = [_maps(size) or FEATURES for size in given]
    if flow.axes[-1] == OTHER:
        return flow.shaped([OTHER, *labels[1:-1], OTHER])
    if len(given) > 2 and literal(given[-1]) == 1:  # as (batch, features, 1, 1) beside an image
        inner = viewed(flow, given[:-1])
        return inner.shaped([*inner.axes, OTHER]) if inner.axes else inner
    if labels[0] == flow.axes[0] > 0:  # of maps that stand first already
        return flow.shaped([labels[0], *[OTHER] * (len(labels) - 2), FEATURES])
    divided = isinstance(given[0], ast.BinOp) and literal(given[0].right) == labels[1]
    if divided or _are_apart(flow.axes):  # pairs in a batch; tokens
        return flow.shaped([*[OTHER] * (len(labels) - 1), FEATURES])
    maps = next((place for place, label in enumerate(labels) if label > 0 and place), len(labels))
    leading = min(2, maps, len(labels) - 1)  # batch and tokens
    return flow.shaped([OTHER] * leading + labels[leading:])


def _are_apart(axes: Sequence[int]) -> bool:
    """Whether something else stands between features, as tokens between heads and their sizes."""
    inner = [place for place, label in enumerate(axes) if label != OTHER]
    return any(label == OTHER for label in axes[inner[0] : inner[-1]])


def unflattened(flow: Flow, axis: int, sizes: Sequence[ast.expr]) -> Flow:
    """`unflatten`: an axis becomes several."""
    inner = [OTHER if flow.axes[axis] == OTHER else _maps(size) or FEATURES for size in sizes]
    return flow.shaped([*flow.axes[:axis], *inner, *flow.axes[axis + 1 :]])


def _maps(size: ast.expr) -> int:
    """A plain number above 1 among the sizes of a view; 0 for any other."""
    number = literal(size) or 0
    return number if number > 1 else 0


def flattened(flow: Flow, start: int | None, end: int | None) -> Flow:
    """`flatten`: axes from `start` to `end` become one."""
    if start is None or end is None or end < start:
        return flow.lost()
    label = _merged(flow.axes[start : end + 1])
    return flow.shaped([*flow.axes[:start], label, *flow.axes[end + 1 :]])


def _merged(labels: Sequence[int]) -> int:
    """What an axis made of several holds: features only if all do."""
    return labels[0] if len(labels) == 1 else FEATURES if labels and all(labels) else OTHER


def permuted(flow: Flow, dims: Sequence[int | None]) -> Flow:
    """`permute`: the axes in this order."""
    flow = flow.of_rank(len(dims))
    places = [place for dim in dims if (place := flow.axis(dim)) is not None]
    if sorted(places) != [*range(len(flow.axes))]:
        return flow.lost()
    return flow.shaped([flow.axes[place] for place in places])


def moved(flow: Flow, source: int | None, target: int | None, *, swap: bool) -> Flow:
    """`movedim`, or `transpose`, which puts the one axis where the other was."""
    start, end = flow.axis(source), flow.axis(target)
    if start is None or end is None:
        return flow.lost()
    order = [*range(len(flow.axes))]
    if swap:
        order[start], order[end] = end, start
    else:
        order.insert(end, order.pop(start))
    return permuted(flow, order)


def rearranged(flow: Flow, pattern: str, sizes: Mapping[str, int | None]) -> Flow:
    """einops: "b n (three h d) -> three b h n d" with three=3."""
    left, right = (re.findall(r"\([^)]*\)|\S+", side) for side in pattern.split("->"))
    flow = flow.of_rank(len(left))
    if len(left) != len(flow.axes):
        return flow.lost()
    held: dict[str, int] = {}
    for group, label in zip(left, flow.axes, strict=True):
        for name in group.strip("()").split():
            held[name] = OTHER if label == OTHER else sizes.get(name) or FEATURES
    return flow.shaped(
        [_merged([held.get(n, OTHER) for n in g.strip("()").split()]) for g in right]
    )


# -------------------------------------------------------------------------------------- numbers


def literal(node: ast.expr | None) -> int | None:
    """A whole number that the code has as such."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = literal(node.operand)
        return None if found is None else -found
    found = node.value if isinstance(node, ast.Constant) else None
    return found if type(found) is int else None


def number(node: ast.expr | None, this: Any) -> int | None:
    """The same, or made of attributes of the module `this`, as `2 * self.width`."""
    match node:
        case ast.Attribute():
            found = _attribute(node, this)
            return found if type(found) is int else None
        case ast.BinOp(left=left, op=op, right=right):
            one, other = number(left, this), number(right, this)
            if one is None or other is None:
                return None
            match op:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.FloorDiv():
                    return one // other if other else None
                case _:
                    return None
        case _:
            return literal(node)


def attribute(path: str) -> ast.expr:
    """`self.a.b` of a path "a.b"."""
    return reduce(ast.Attribute, path.split("."), ast.Name("self"))


def outward(node: ast.expr, path: str) -> ast.expr:
    """An expression in the code of the module at a path, as that of the one around it."""

    class Outward(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return attribute(path) if node.id == "self" else node

    return Outward().visit(copy.deepcopy(node)) if path else node


def _attribute(node: ast.expr, this: Any) -> Any:
    if isinstance(node, ast.Name):
        return this if node.id == "self" else None
    if not isinstance(node, ast.Attribute):
        return None
    holder = _attribute(node.value, this)
    child = holder._modules.get(node.attr) if isinstance(holder, nn.Module) else None
    if child is not None:
        return child
    return inspect.getattr_static(holder, node.attr, None)  # where `getattr` runs a property
