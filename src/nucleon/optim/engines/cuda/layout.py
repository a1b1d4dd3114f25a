"""Where the matrices of a stack lie in contiguous tensors like its parameters, in entries."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch

from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.stacks import LARGEST_GRID, Stack


@dataclass(frozen=True)
class Layout:
    """Runs of matrices with one distance between them, and one between their rows."""

    offsets: tuple[tuple[int, ...], ...]
    """For each piece, of the first matrix of each run of `each`."""
    each: int
    """Matrices in a run; all pieces are made of such runs."""
    inner: int
    """From one matrix of a run to the next."""
    stride: int
    """From one row to the next."""

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return sum(map(len, self.offsets))

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return self.each * self.runs


def layout_of(stack: Stack) -> Layout | None:
    """The layout of a stack; None where no one rule says it for all pieces."""
    found = [strides(piece.block, tuple(piece.param.shape)) for piece in stack.pieces]
    if None in found or len({place[2] for place in found if place}) > 1:
        return None
    places = cast(list[tuple[int, int, int]], found)
    _, inner, stride = places[0]
    alike = all(place[1] == inner for place in places)
    each = math.gcd(*(piece.count for piece in stack.pieces)) if alike else 1
    offsets = (
        tuple(o + k * i for k in range(p.start, p.stop, each))
        for (o, i, _), p in zip(places, stack.pieces, strict=True)
    )
    layout = Layout(tuple(offsets), each, inner, stride)
    return layout if layout.count <= LARGEST_GRID else None


@lru_cache(maxsize=4096)
def strides(block: Block, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Offset and strides of matrices and rows in a contiguous tensor; None if they have none."""
    region = block.region(torch.empty(shape, device="meta"))
    try:
        view = region.view(block.count, block.rows, block.columns)
    except RuntimeError:
        return None
    offset, (inner, row, column) = int(view.storage_offset()), view.stride()
    return (offset, inner, row) if column == 1 else None
