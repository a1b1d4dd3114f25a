"""Where the matrices of a stack lie in memory, whatever axes of a parameter they are made of.

The kernels read every matrix short side first. Entry (i, j) lies at

    start + short(i) + long(j),   side(k) = (k // size)·stride + (k % size)·within

A weight that is stored transposed, a cut into heads and a kernel in channels-last memory differ in
these numbers alone. `size` is 1 but where a side is made of two axes that are apart in memory.

A step that moves the weights itself may go through the long side in the order of the memory: with
columns exchanged GGᵀ stays as it is, and P has the same columns exchanged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nucleon.optim.matrices import shards
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.stacks import LARGEST_GRID, Stack


@dataclass(frozen=True)
class Side:
    """Where the entries along one side of a matrix lie, in entries from its start."""

    stride: int
    size: int = 1
    within: int = 0

    @property
    def folded(self) -> bool:
        """Whether it takes two strides."""
        return self.size > 1


@dataclass(frozen=True)
class Place:
    """The matrices of a block in a tensor of given strides."""

    short: Side
    long: Side
    starts: tuple[int, ...]
    inner: int | None
    """From one matrix to the next; None where that is not one number."""


@dataclass(frozen=True)
class Layout:
    """Runs of matrices with one distance between them."""

    short: Side
    long: Side
    offsets: tuple[tuple[int, ...], ...]
    """For each piece, of the first matrix of each run of `each`."""
    each: int
    """Matrices in a run; all pieces are made of such runs."""
    inner: int
    """From one matrix of a run to the next."""
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    """For each piece, those of its parameter, which all tensors like it must have."""

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return sum(map(len, self.offsets))

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return self.each * self.runs


def layout_of(stack: Stack, *, in_order: bool = True) -> Layout | None:
    """The layout of a stack; None where no one rule says it for all pieces.

    `in_order` says that the long side has the order of its axes, not that of the memory.
    """
    found = [place_of(piece.param, piece.block, in_order=in_order) for piece in stack.pieces]
    places = [place for place in found if place is not None]
    if len(places) < len(found) or len({(place.short, place.long) for place in places}) > 1:
        return None
    first = places[0]
    alike = first.inner is not None and all(place.inner == first.inner for place in places)
    each = math.gcd(*(piece.count for piece in stack.pieces)) if alike else 1
    offsets = (
        place.starts[piece.start : piece.stop : each]
        for place, piece in zip(places, stack.pieces, strict=True)
    )
    strides = tuple(strides_of(param) for param in stack.params)
    shapes = tuple(param.shape for param in stack.params)
    inner = first.inner or 0
    layout = Layout(first.short, first.long, tuple(offsets), each, inner, shapes, strides)
    return layout if layout.count <= LARGEST_GRID else None


def strides_of(param: Tensor) -> tuple[int, ...]:
    """How tensors like a parameter lie; what is gathered from other ranks is contiguous."""
    return _contiguous(tuple(param.shape)) if shards.sharded(param) else param.stride()


def place_of(param: Tensor, block: Block, *, in_order: bool = True) -> Place | None:
    """Where the matrices of a block lie; None if no two strides per side say it."""
    return _place(block, tuple(param.shape), strides_of(param), in_order)


def has_strides(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor has this shape and these strides; those of axes of length 1 do not count."""
    own = tensor.stride()
    return tensor.shape == shape and (
        own == strides
        or all(a == b or size == 1 for a, b, size in zip(own, strides, shape, strict=True))
    )


def empty_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor with the strides that all tensors like a parameter have."""
    return torch.empty_strided(param.shape, strides_of(param), dtype=dtype, device=param.device)


def restrided(state: Tensor, param: Tensor) -> Tensor:
    """A state tensor with the strides of its parameter: a copy, where it has others.

    Not while a graph is captured, of which the copy would be a part.
    """
    if state.shape != param.shape or has_strides(state, param.shape, strides_of(param)):
        return state
    if torch.cuda.is_current_stream_capturing():
        return state
    return empty_like(param, state.dtype).copy_(state)


def dense(param: Tensor) -> bool:
    """Whether the entries of a parameter fill its memory, each once."""
    return _dense(tuple(param.shape), strides_of(param))


@lru_cache(maxsize=4096)
def _place(
    block: Block, shape: tuple[int, ...], strides: tuple[int, ...], in_order: bool
) -> Place | None:
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
    short, long = map(_side, sides)
    if short is None or long is None:
        return None
    starts = [int(view.storage_offset())]
    for size, stride in batch:
        starts = [start + k * stride for start in starts for k in range(size)]
    merged = _merged(batch)
    inner = None if len(merged) > 1 else merged[0][1] if merged else 0
    return Place(short, long, tuple(starts), inner)


def _side(axes: Sequence[tuple[int, int]]) -> Side | None:
    """A side made of axes, (size, stride) each, the slowest first."""
    merged = _merged(axes)
    if len(merged) > 2:
        return None
    if len(merged) == 2:
        return Side(merged[0][1], *merged[1])
    return Side(merged[0][1] if merged else 1)


def _merged(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same entries in the same order by as few axes as can be."""
    found: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            size *= found.pop()[0]
        found.append((size, stride))
    return found


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the entries fill their memory, each once: a tensor made like it has its strides."""
    expected = 1
    for stride, size in sorted((t, n) for n, t in zip(shape, strides, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=4096)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
