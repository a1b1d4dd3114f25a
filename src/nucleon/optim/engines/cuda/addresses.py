"""Strides and addresses of the tensors of a stack, in tables that the kernels read.

The kernels read every matrix short side first, whatever axes of a parameter it consists of. Entry
(i, j) is at

    start + short(i) + long(j),   side(k) = (k // size)·stride + (k % size)·within

Transposed weights, heads of a weight and kernels in channels-last memory differ only in these
numbers. `size` is 1 unless a side consists of two axes that are apart in memory.

A step that updates the weights itself may read the long side in the order of the memory: if columns
are exchanged, GGᵀ is unchanged, and the same columns of P are exchanged.

A kernel with the address of an irregular tensor would crash the process. So tensors with other
strides than the layout, or of several dtypes or devices, have no addresses.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from nucleon.optim.matrices import shards
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.stacks import LARGEST_GRID, Stack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels read and write."""
_DTYPE = attrgetter("dtype")
T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """Distances of the entries along one side of a matrix from its start, counted in entries."""

    stride: int
    size: int = 1
    within: int = 0


@dataclass(frozen=True)
class BlockLayout:
    """The matrices of a block in a tensor of given strides."""

    short: Side
    long: Side
    starts: tuple[int, ...]
    inner: int | None
    """Distance from one matrix to the next; None if it varies."""


@dataclass(frozen=True)
class Layout:
    """Runs of matrices with one distance between them."""

    short: Side
    long: Side
    offsets: tuple[tuple[int, ...], ...]
    """For each piece, the offset of the first matrix of each run."""
    each: int
    """Matrices in a run; every piece consists of whole runs."""
    inner: int
    """Distance from one matrix of a run to the next."""
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    """For each piece, those of its parameter, which all tensors like it must have."""

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(map(len, self.offsets))

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.each * self.runs


def layout_of(stack: Stack, *, in_order: bool = True) -> Layout | None:
    """Return the layout of a stack; None if its pieces have no common one.

    With `in_order` the long side has the order of its axes, otherwise that of the memory.
    """
    candidates = [block_layout(p.param, p.block, in_order=in_order) for p in stack.pieces]
    blocks = [block for block in candidates if block is not None]
    if len(blocks) < len(candidates) or len({(block.short, block.long) for block in blocks}) > 1:
        return None
    first = blocks[0]
    alike = first.inner is not None and all(block.inner == first.inner for block in blocks)
    each = math.gcd(*(piece.count for piece in stack.pieces)) if alike else 1
    offsets = (
        block.starts[piece.start : piece.stop : each]
        for block, piece in zip(blocks, stack.pieces, strict=True)
    )
    strides = tuple(strides_of(param) for param in stack.params)
    shapes = tuple(param.shape for param in stack.params)
    inner = first.inner or 0
    layout = Layout(first.short, first.long, tuple(offsets), each, inner, shapes, strides)
    return layout if layout.count <= LARGEST_GRID else None


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Return the strides of tensors like a parameter; those gathered from ranks are contiguous."""
    return _contiguous(tuple(param.shape)) if shards.sharded(param) else param.stride()


def block_layout(param: Tensor, block: Block, *, in_order: bool = True) -> BlockLayout | None:
    """Return the layout of the matrices of a block; None if two strides per side are too few."""
    return _block_layout(block, tuple(param.shape), strides_of(param), in_order)


def has_strides(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if a tensor has this shape and, on axes longer than 1, these strides."""
    actual = tensor.stride()
    return tensor.shape == shape and (
        actual == strides
        or all(a == b or size == 1 for a, b, size in zip(actual, strides, shape, strict=True))
    )


def empty_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor with the strides of tensors like a parameter."""
    return torch.empty_strided(param.shape, strides_of(param), dtype=dtype, device=param.device)


def restrided(state: Tensor, param: Tensor) -> Tensor:
    """Return a state tensor in the strides of its parameter, copied if it has others.

    While a graph is captured, which would include the copy, return the tensor itself.
    """
    if state.shape != param.shape or has_strides(state, param.shape, strides_of(param)):
        return state
    if torch.cuda.is_current_stream_capturing():
        return state
    return empty_like(param, state.dtype).copy_(state)


def dense(param: Tensor) -> bool:
    """Return True if the entries of a parameter fill its memory, each once."""
    return _dense(tuple(param.shape), strides_of(param))


@lru_cache(maxsize=4096)
def _block_layout(
    block: Block, shape: tuple[int, ...], strides: tuple[int, ...], in_order: bool
) -> BlockLayout | None:
    if not _dense(shape, strides):
        return None
    view = block.region(torch.empty_strided(shape, strides, device="meta"))
    axes = list(zip(view.shape, view.stride(), strict=True))
    batch, rest = axes[: len(block.batch)], axes[len(block.batch) :]
    many = next(k for k in range(len(rest) + 1) if math.prod(n for n, _ in rest[:k]) == block.rows)
    sides = [rest[:many], rest[many:]]
    if block.rows > block.columns:
        sides.reverse()
    if not in_order:
        sides[1].sort(key=lambda axis: -axis[1])
    short, long = (_merged(side) or [(1, 1)] for side in sides)
    if max(len(short), len(long)) > 2:
        return None
    starts = [int(view.storage_offset())]
    for size, stride in batch:
        starts = [start + k * stride for start in starts for k in range(size)]
    apart = _merged(batch) or [(1, 0)]
    inner = apart[0][1] if len(apart) == 1 else None
    return BlockLayout(_side(short), _side(long), tuple(starts), inner)


def _side(axes: Sequence[tuple[int, int]]) -> Side:
    """Return a side of one axis or two, (size, stride) each, the slower first."""
    return Side(axes[0][1], *(axes[1] if len(axes) > 1 else ()))


def _merged(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge axes that are one in memory."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    return merged


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return True if the strides are those of a contiguous tensor with permuted axes."""
    expected = 1
    for stride, size in sorted((t, n) for n, t in zip(shape, strides, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ---------------------------------------------------------------------- addresses


class Followed(Generic[T]):
    """A result computed from tensors, and again when the address of one changes."""

    def __init__(self) -> None:
        self.result: T | None = None
        self._tensors: Sequence[Sequence[Tensor]] = ()
        self._starts: Sequence[int] = ()

    def get(self, tensors: Sequence[Sequence[Tensor]], find: Callable[[], T | None]) -> T | None:
        """Return the result of `find`, or the last one if the addresses are unchanged."""
        # The tensors are kept, so nothing else can be at their addresses.
        starts = [*map(Tensor.data_ptr, chain.from_iterable(tensors))]
        if self._starts != starts:
            self.result, self._tensors, self._starts = find(), tensors, starts
        return self.result


def regular(
    gradients: Sequence[Tensor | None],
    params: Sequence[Tensor],
    strides: Sequence[object],
    allowed: Collection[torch.dtype] = DTYPES,
) -> tuple[Sequence[Tensor | None], torch.dtype]:
    """Return gradients of one dtype in the strides of their parameters, and the dtype.

    Dtypes that are not `allowed` become float32. `strides` are those of the parameters: gradients
    that have them are returned at once. For DTensors pass the parts on this rank.
    """
    there = [g for g in gradients if g is not None]
    dtypes = set(map(_DTYPE, there)) or {params[0].dtype}
    dtype = dtypes.pop()
    if dtypes or dtype not in allowed:
        dtype = torch.float32
    elif len(there) == len(params) and tuple(map(Tensor.stride, there)) == strides:
        return there, dtype
    copied = [*gradients]
    other: list[tuple[Tensor, Tensor]] = []
    for i, (gradient, param) in enumerate(zip(gradients, params, strict=True)):
        if gradient is None:
            continue
        if gradient.dtype == dtype and has_strides(gradient, param.shape, strides_of(param)):
            continue
        copied[i] = new = empty_like(param, dtype)
        other.append((new, gradient))
    if other:
        torch._foreach_copy_([new for new, _ in other], [old for _, old in other])
    return copied, dtype


def of_regular(layout: Layout, tensors: Sequence[Tensor | None]) -> list[int] | None:
    """Return the address of each run in tensors in the strides of their parameters; 0 for None.

    Return None if a tensor has no storage, like some subclasses.
    """
    size = next((tensor.element_size() for tensor in tensors if tensor is not None), 0)
    starts = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    if 0 in starts and not all(s for s, t in zip(starts, tensors, strict=True) if t is not None):
        return None
    runs = zip(starts, layout.offsets, strict=True)
    return [start and start + size * offset for start, offsets in runs for offset in offsets]


def of_tensors(
    layout: Layout,
    tensors: Sequence[Tensor],
    device: torch.device,
    allowed: Collection[torch.dtype] = DTYPES,
) -> list[int] | None:
    """Return the address of each run in tensors like the parameters; None if one is irregular."""
    forms = zip(tensors, layout.shapes, layout.strides, strict=True)
    if not all(has_strides(tensor, *form) for tensor, *form in forms):
        return None
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1 or any(t not in allowed or d != device for t, d in kinds):
        return None
    return of_regular(layout, tensors)


def alignment(addresses: Sequence[int], size: int) -> int:
    """Return 16 if all addresses are multiples of it, else the size of an entry in bytes.

    Parts of a flat buffer, as of gradients, may begin anywhere in it.
    """
    return 16 if math.gcd(16, *addresses) == 16 else size


def of_stack(
    stack: Stack,
    layout: Layout,
    states: Sequence[Mapping[str, Tensor]],
    kinds: Sequence[str],
    weights: Sequence[Tensor],
    totals: Collection[torch.dtype],
) -> list[int] | None:
    """Return the address of each run in the states, kind after kind, then in the weights.

    Return None if a tensor is irregular. The kinds are keys of states, with "gram" for the Gram
    matrices of a piece; all matrices share one "step". `totals` are the readable dtypes of Ĝ.
    """
    device, m = stack.params[0].device, min(stack.shape)
    places: list[int] = []
    for kind in kinds:
        if kind == "gram":
            grams = _owned(stack, layout, m, m)
            part = of_tensors(grams, stack.grams(states), device, (torch.float32,))
        elif kind == "total":
            part = of_tensors(layout, [state[kind] for state in states], device, totals)
        elif kind == "step":
            step = states[0][kind]
            regular = (step.dtype, step.device) == (torch.int64, device)
            part = [step.data_ptr()] * layout.runs if regular else None
        else:
            counts = stack.own(state[kind] for state in states)
            part = of_tensors(_owned(stack, layout), counts, device, (torch.int64,))
        if part is None:
            return None
        places += part
    part = of_tensors(layout, weights, device) if weights else []
    return None if part is None else places + part


def _owned(stack: Stack, layout: Layout, *entry: int) -> Layout:
    """Return the layout of state tensors with an entry of this shape for each matrix."""
    shapes = tuple(torch.Size((count, *entry)) for count in stack.counts)
    strides = tuple(_contiguous(tuple(shape)) for shape in shapes)
    each = layout.each * math.prod(entry)
    offsets = tuple(tuple(range(0, math.prod(shape), each)) for shape in shapes)
    return replace(layout, offsets=offsets, shapes=shapes, strides=strides)


def table(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Return addresses as a tensor on the device, without synchronization."""
    entries = torch.empty(len(addresses), dtype=torch.int64, device=device)
    send(addresses, entries)
    return entries


def send(addresses: Sequence[int], table: Tensor) -> None:
    """Write addresses into a table, without synchronization."""
    with torch.cuda.device_of(table):
        if torch.cuda.is_current_stream_capturing():
            # As arguments of kernels, since host memory may be gone when the graph is replayed.
            torch._foreach_add_(table.zero_().unbind(), addresses)
        else:
            host = torch.tensor(addresses, device="cpu").pin_memory()
            table.copy_(host, non_blocking=True)
