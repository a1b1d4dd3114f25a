"""A module's code, read and not run: what its children give, followed to where it is cut or joined.

A small interpreter of Python's syntax trees over `flows`: names, branches, loops and calls as in
the source, tensors by their axes alone.
"""

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch import nn

from nucleon.optim.routing import flows, fused
from nucleon.optim.routing.flows import OTHER, Child, Cut, Flow, Given, Pieces, Several, Value
from nucleon.optim.routing.sources import parsed

DEPTH, CALLS = 4, 200
"""Calls within calls that are followed, and how many in all."""
_SAME = re.compile(
    r"contiguous|float|half|double|bfloat16|to|type(_as)?|clone|detach|expand|pad|masked_fill|exp"
    r"|(softplus|softmax|sigmoid|tanh|silu|gelu|elu|mish|(leaky_)?relu|clamp|clip|mul|div|add)_?"
    r"|dropout|normalize|layer_norm|rms_norm"
)
"""Operations that leave the axes as they are."""

_Names = dict[str, Value]


class Reader:
    """Follows what children give through the code of their module."""

    def __init__(self, module: nn.Module) -> None:
        self.root = self.module = module
        self.path = ""
        self.cuts: dict[object, Cut] = {}
        self.numbers: list[tuple[ast.expr, int | None]] = []
        self.depth = self.calls = 0
        self.returned: list[Value] = []
        self.stored: dict[str, list[Value]] = {}
        self.scope: Mapping[str, Any] = {}

    def follow(self, function: Any, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """What a function gives."""
        tree = parsed(function)
        if tree is None or self.depth == DEPTH or self.calls == CALLS:
            return flows.mixed([*args, *named.values()])
        given = [arg.arg for arg in (*tree.args.posonlyargs, *tree.args.args)]
        names: _Names = {**dict(zip(given, args, strict=False)), **named}
        outer = self.returned, self.stored, self.scope
        self.returned, self.stored, self.scope = [], {}, inspect.unwrap(function).__globals__
        self.depth, self.calls = self.depth + 1, self.calls + 1
        self.run(tree.body, names)
        self.depth -= 1
        found, (self.returned, self.stored, self.scope) = self.returned, outer
        return flows.either(found)

    # ------------------------------------------------------------------------------ statements

    def run(self, body: Sequence[ast.stmt], names: _Names) -> bool:
        """Take statements in turn; whether they end in a return or the like."""
        ends = [self.statement(each, names) for each in body]
        return any(ends)

    def statement(self, node: ast.stmt, names: _Names) -> bool:
        """Take one statement; whether it ends the block."""
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value, names)
                for target in targets:
                    self.bind(target, found, names)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value, names), names)
            case ast.AugAssign(target=target, op=op, value=value):
                self.bind(target, self.value(ast.BinOp(target, op, value), names), names)
            case ast.Return(value=ast.expr() as value):
                self.returned.append(self.value(value, names))
                return True
            case ast.If(test=test, body=body, orelse=orelse):
                self.value(test, names)
                return self.branch([body, orelse], names)
            case ast.For(target=target, iter=over, body=body, orelse=orelse):
                self.bind(target, self.element(over, names), names)
                self.run([*body, *orelse], names)
            case ast.FunctionDef(body=body):
                returned, self.returned = self.returned, []
                self.run(body, dict(names))
                self.returned = returned
            case ast.Raise() | ast.Break() | ast.Continue() | ast.Return():
                return True
            case _:
                self.within(node, names)
        return False

    def branch(self, bodies: Sequence[Sequence[ast.stmt]], names: _Names) -> bool:
        """Take each way from the same names; afterwards a name is what it is on any of them."""
        ways = [(body, dict(names)) for body in bodies]
        left = [own for body, own in ways if not self.run(body, own)]
        for name in {name for own in left for name in own}:
            names[name] = flows.either([own.get(name) for own in left])
        return not left

    def within(self, node: ast.AST, names: _Names) -> None:
        """Take what stands in anything else: `with`, `try`, a comparison."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, names)
            elif isinstance(child, ast.stmt):
                self.statement(child, names)
            else:
                self.within(child, names)

    def bind(self, target: ast.expr, value: Value, names: _Names) -> None:
        """Assign to a name, part by part to several, or to slices of what they fill together."""
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for place, each in enumerate(target.elts):
                self.bind(each, self.item(value, place, len(target.elts)), names)
        elif isinstance(target, ast.Subscript) and flows.is_part(target.slice):
            stored = self.stored.setdefault(ast.unparse(target.value), [])
            stored.append(value)
            whole = flows.joined(Several(tuple(stored))) if len(stored) > 1 else None
            if whole is not None:
                self.bind(target.value, whole, names)

    def item(self, value: Value, place: int, count: int | None = None) -> Value:
        """An entry of a tensor or a tuple, of `count` where that is known."""
        match value:
            case Flow(axes=[_, *_], loose=False):
                return self.item(self.entries(value, 0, count), place, count)
            case Pieces(cut=cut):
                cut.parts = max(cut.parts or 0, count or 0) or None
                return value.piece(place)
            case Several(items=items):
                return items[place] if -len(items) <= place < len(items) else flows.mixed(items)
            case _:
                return flows.mixed([value])

    def element(self, over: ast.expr, names: _Names) -> Value:
        """What a loop has in each round: an entry of a list of modules, or of tensors."""
        match over:
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                return Several((None, self.element(inner, names)))
            case ast.Call(func=ast.Name(id="zip"), args=args):
                return Several(tuple(self.element(each, names) for each in args))
            case _:
                found = self.value(over, names)
                if isinstance(found, Pieces):
                    return found.piece(None)
                return found if isinstance(found, Child) else flows.mixed([found])

    # ----------------------------------------------------------------------------- expressions

    def value(self, node: ast.expr, names: _Names) -> Value:
        """What an expression gives."""
        match node:
            case ast.Name(id=name):
                return names.get(name)
            case ast.Attribute(value=inner, attr=name):
                return self.attribute(self.value(inner, names), name)
            case ast.Call():
                return self.call(node, names)
            case ast.Subscript(value=inner, slice=index):
                return self.subscript(self.value(inner, names), index)
            case ast.BinOp(left=left, op=op, right=right):
                return self.combined(op, left, right, names)
            case ast.UnaryOp(operand=inner) | ast.Starred(value=inner):
                return self.value(inner, names)
            case ast.NamedExpr(target=target, value=inner):
                self.bind(target, found := self.value(inner, names), names)
                return found
            case ast.IfExp(body=body, orelse=orelse):
                return flows.either([self.value(body, names), self.value(orelse, names)])
            case ast.Tuple(elts=nodes) | ast.List(elts=nodes):
                return Several(tuple(self.value(each, names) for each in nodes), tuple(nodes))
            case ast.GeneratorExp() | ast.ListComp():
                return self.comprehension(node, names)
            case ast.Lambda(body=body):
                self.value(body, dict(names))
                return None
            case _:
                self.within(node, names)
                return None

    def comprehension(self, node: ast.GeneratorExp | ast.ListComp, names: _Names) -> Value:
        """The tensors that it goes over: what it does with each leaves their order as it is."""
        own = dict(names)
        for over in node.generators:
            self.bind(over.target, self.element(over.iter, own), own)
        found, every = self.value(node.elt, own), self.value(node.generators[0].iter, names)
        return every if isinstance(every, Pieces | Several) else flows.mixed([found])

    def attribute(self, value: Value, name: str) -> Value:
        """A module within, its weight, or a tensor transposed."""
        if isinstance(value, Child):
            path = f"{value.path}.{name}".removeprefix(".")
            if self.child(path) is not None:
                return Child(path)
            if name == "weight" and value.path:
                return Flow(frozenset({value.path}), (flows.FEATURES, OTHER))
        if isinstance(value, Flow) and name in ("T", "mT"):
            return flows.moved(value, -1, -2, swap=True)
        return None

    def number(self, node: ast.expr) -> int | None:
        """A number that the code has, or that the module has: what is read then rests on it."""
        node = flows.outward(node, self.path)
        found = flows.number(node, self.root)
        if flows.literal(node) is None:
            self.numbers.append((node, found))
        return found

    def child(self, path: str) -> nn.Module | None:
        """The module at a path."""
        found: nn.Module | None = self.module
        for name in path.split("."):
            found = None if found is None else found._modules.get(name)
        return found

    def combined(self, op: ast.operator, left: ast.expr, right: ast.expr, names: _Names) -> Value:
        """Of a sum or a product: a bias or a scale leaves a tensor what it is, a residual not."""
        sides = [self.value(left, names), self.value(right, names)]
        if any(isinstance(side, Several) for side in sides):  # a shape: leading sizes + (h, d)
            pairs = zip(sides, (left, right), strict=True)
            nodes = [s.nodes if isinstance(s, Several) else (ast.Starred(n),) for s, n in pairs]
            return Several((), nodes[0] + nodes[1])
        found = flows.tensors(sides)
        if len(found) == 1 and isinstance(op, ast.Add | ast.Sub):
            beside = right if found[0] is sides[0] else left
            own = isinstance(beside, ast.Attribute | ast.Constant)
            return found[0] if own else flows.mixed(found)
        if any(flow.pieces for flow in found):
            return flows.mixed(found, summed=isinstance(op, ast.Add | ast.Sub))
        return None if isinstance(op, ast.MatMult) else flows.either(found)

    # ----------------------------------------------------------------------------------- calls

    def call(self, node: ast.Call, names: _Names) -> Value:
        """What a call gives, whatever is called."""
        args = [self.value(each, names) for each in node.args]
        named = {k.arg: (k.value, self.value(k.value, names)) for k in node.keywords if k.arg}
        values = {name: value for name, (_, value) in named.items()}
        given = Given(node.args, args, named, self.number)
        owner, name = None, getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute):
            owner, name = self.value(node.func.value, names), node.func.attr
        if isinstance(owner, Flow):
            return self.operation(name, owner, given)
        if isinstance(owner, Several) and name == "append" and isinstance(node.func, ast.Attribute):
            return self.bind(node.func.value, Several((*owner.items, *args)), names)
        callee = self.value(node.func, names)
        if isinstance(owner, Child) and callee is None:
            if not owner.path:
                return self.method(name, args, values)
            callee = owner if name in ("forward", "__call__") else None
        children = [x.path for x in (callee, *args) if isinstance(x, Child) and x.path]
        if children:  # called, or handed to what calls it, as a checkpoint does
            return self.output(children[0], args, values)
        own = self.scope.get(name) if isinstance(node.func, ast.Name) else None
        if isinstance(own, FunctionType) and not own.__module__.startswith(("torch.", "einops.")):
            return (
                self.follow(own, args, values) if flows.tensors([*args, *values.values()]) else None
            )
        return self.function(name, args, values, given)

    def method(self, name: str, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """A method of the module itself, or a function that it keeps, as an activation."""
        found = inspect.getattr_static(type(self.module), name, None)
        if isinstance(found, staticmethod):
            return self.follow(found.__func__, args, named)
        if isinstance(found, FunctionType):
            return self.follow(found, [Child(""), *args], named)
        given = flows.tensors([*args, *named.values()])
        return flows.mixed(given) or (given[0] if given and found is None else None)

    def output(self, path: str, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """What a child gives: a map something new, a norm or an activation what it is given."""
        child, found = self.child(path), flows.tensors([*args, *named.values()])
        if child is None:
            return None
        if fused.is_map(child):
            return flows.output(path, child)
        if found and fused.GLU.search(type(child).__name__):
            dim = self.number(flows.attribute(f"{path}.dim"))
            return self.glu(found[0], -1 if dim is None else dim)
        whole = found[0] if len(found) == 1 else flows.mixed(found)
        of_torch = type(child).__module__.startswith("torch.")
        if not found or of_torch or child._modules or child._parameters:
            return whole
        count, outer = len(self.cuts), (self.module, self.path)
        self.module, self.path = child, path
        given = self.method("forward", [x for x in args if not isinstance(x, Child)], named)
        self.module, self.path = outer
        return whole if len(self.cuts) == count else given

    def function(
        self, name: str, args: Sequence[Value], named: Mapping[str, Value], given: Given
    ) -> Value:
        """A function of torch or einops, or one that the file of the module has."""
        values = [*args, *named.values()]
        first = args[0] if args else named.get("input", named.get("tensors"))
        if name in ("cat", "concat", "concatenate", "stack", "hstack"):
            return flows.joined(first)
        if name in ("tuple", "list"):
            return first
        if name == "map":
            return args[-1]
        if re.fullmatch(r"linear|conv\dd", name) and "groups" not in named:
            paths = [p for x in values if isinstance(x, Flow) for p in x.names if len(x.axes) == 2]
            child = self.child(paths[0]) if paths else None
            return None if child is None else flows.output(paths[0], child)
        if isinstance(first, Flow):
            rest = replace(given, nodes=given.nodes[1:], values=given.values[1:])
            return self.operation(name, first, rest)
        return flows.mixed(values)

    def operation(self, name: str, flow: Flow, given: Given) -> Value:
        """A method of a tensor, or the function of torch or einops of the same name."""
        if not flow.axes or _SAME.fullmatch(name):
            return flow
        if fused.GLU.search(name):
            return self.glu(flow, given.number(0, "dim", -1))
        dim = flow.axis(given.number(0, "dim", 0))
        match name:
            case "chunk" | "split" | "tensor_split":
                return self.split(name, flow, given)
            case "unbind" if dim is not None:
                return self.entries(flow, dim)
            case "select" | "narrow" if dim is not None:
                start = given.node(1, "index", "start") or ast.Constant(None)
                index = start if name == "select" else ast.Slice(start, given.node(2, "length"))
                return self.subscript(flow, ast.Tuple([*[ast.Slice()] * dim, index]))
            case _:
                return flows.arranged(name, flow, given)

    # ------------------------------------------------------------------------------------ cuts

    def made(self, flow: Flow, axis: int, how: str, *, parts: int | None = None) -> Cut:
        """The cut of a tensor along an axis, the same one wherever it is made in this way."""
        return self.cuts.setdefault((flow, axis, how), Cut(flow, parts))

    def entries(self, flow: Flow, axis: int, count: int | None = None) -> Value:
        """All entries along an axis: maps, where a view gave them one or so many names wait."""
        label, rest = flow.axes[axis], flow.axes[:axis] + flow.axes[axis + 1 :]
        if label == OTHER or (label < 0 and count is None):
            return flows.mixed([flow])
        return Pieces(self.made(flow, axis, "all", parts=max(label, 0) or count), rest)

    def split(self, name: str, flow: Flow, given: Given) -> Value:
        """What `chunk`, `split` and `tensor_split` give."""
        dim, count = given.number(1, "dim", 0), given.number(0, "chunks")
        second = flow.loose and dim == 1  # of a Linear that takes (batch, features), or of tokens
        if second and (name == "split" or (name == "chunk" and count is not None)):
            dim = flow.axes.index(flows.FEATURES)
        axis = flow.axis(dim)
        if axis is None or flow.axes[axis] == OTHER:
            return flows.mixed([flow])
        first = replace(given, nodes=given.nodes[:1], values=given.values[:1])  # not the axis
        nodes = first.sizes(0, "split_size_or_sections", "split_size", "indices_or_sections")
        listed = isinstance((given.values or [None])[0], Several)
        cut = self.made(flow, axis, ast.dump(ast.Tuple([*given.nodes])))
        cut.parts = count if name == "chunk" else len(nodes) if listed else cut.parts
        sizes = tuple(flows.outward(node, self.path) for node in nodes)
        cut.sizes = sizes if listed and name == "split" else None
        cut.marks = [*sizes] if second and name == "split" else None
        return Pieces(cut, flow.axes)

    def glu(self, flow: Flow, dim: int | None) -> None:
        """A gate and what it gates are two maps."""
        axis = flow.axis(dim)
        if axis is not None and flow.axes[axis] != OTHER:
            self.made(flow, axis, "glu", parts=2)

    def subscript(self, value: Value, index: ast.expr) -> Value:
        """What an index or slices take of a tensor, a tuple or a list of modules."""
        if isinstance(value, Child):  # an entry of a list goes by the path of the list
            return value
        if not isinstance(value, Flow) or not value.axes:
            place = flows.literal(index)
            if place is not None:
                return self.item(value, place)
            return value.piece(None) if isinstance(value, Pieces) else flows.mixed([value])
        items = [*index.elts] if isinstance(index, ast.Tuple) else [index]
        taken = sum(not isinstance(x, ast.Constant) or type(x.value) is int for x in items)
        paired = taken == 2 and not any(_is(each, ...) for each in items)
        if paired and len(items) > 2 and _is(items[-1], None):  # (batch, features), for images
            value = value.of_rank(2)
        flow = value.of_rank(max(taken, len(value.axes)))
        if taken > len(flow.axes):
            return flows.mixed([flow])
        rest, axis = len(flow.axes) - taken, 0
        if not any(_is(each, ...) for each in items):
            items.append(ast.Constant(...))
        axes: list[int] = []
        pieces: set[tuple[Cut, str]] = set()
        if value.loose and paired and flows.is_part(items[1]) and not flows.is_part(items[0]):
            pieces.add(self.second(value, items[1]))
        for each in items:
            if _is(each, ...):
                axes += flow.axes[axis : axis + rest]
                axis += rest
                continue
            if _is(each, None):
                axes.append(OTHER)
                continue
            label, axis = flow.axes[axis], axis + 1
            place = flows.literal(each)
            if isinstance(each, ast.Slice):
                axes.append(label)
                if label != OTHER and flows.is_part(each):
                    pieces.add(self.sliced(flow, axis - 1, ast.unparse(each)))
            elif place is None:  # by a tensor, or a number that is not known
                return flows.mixed([flow])
            elif label > 0:
                pieces.add(self.sliced(flow, axis - 1, str(place)))
        loose = value.loose and not taken and _is(items[0], ...)  # y[..., None]
        return Flow(flow.names, tuple(axes), loose, flow.pieces | pieces)

    def second(self, flow: Flow, part: ast.expr) -> tuple[Cut, str]:
        """A slice of the second axis of what a Linear gives: of features, or of tokens."""
        found, how = self.sliced(flow, 1, ast.unparse(part))
        start = part.lower if isinstance(part, ast.Slice) and part.lower else ast.Constant(0)
        found.marks = [*(found.marks or []), flows.outward(start, self.path)]
        return found, how

    def sliced(self, flow: Flow, axis: int, how: str) -> tuple[Cut, str]:
        """A slice as a part of a cut: the others are seen elsewhere in the code."""
        found = self.made(flow, axis, "slices")
        found.seen.add(how)
        found.parts = max(flow.axes[axis], 0) or len(found.seen)
        return found, how


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
