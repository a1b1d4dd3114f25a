"""Rows, columns and batch among the axes of a parameter: a parameter read as matrices.

A spec has one word for each axis, in order. Rows r are outputs, columns c are inputs:

    "r c"               a Linear weight, used as x @ W.T: rows, columns
    "c r"               a weight that is used as x @ W
    "b r c"             a stack of matrices
    "r c c c"           a convolution kernel: every input channel and tap is a column
    "(b=3 r) c"         queries, keys and values in one weight, the same size each
    "r{512,128,128} c"  the three with unequal sizes: an axis in sections, a matrix each
    "(b=4 r) c c c"     a convolution in 4 groups
    "(r=8 r{16,16,64}) c"  8 heads, each with sections of the three maps

Axes `b` count matrices, axes `r` are flattened into rows and axes `c` into columns, in order. In
parentheses one axis is the product of several, slowest first, of which one may lack its size. At
most one axis, or one factor of an axis, has sections.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Self

import torch
from torch import Tensor

_CUT = r"\{(\s*\d+(?:\s*,\s*\d+)*\s*)\}"
_PART = rf"([brc])(?:=(\d+)|{_CUT})?"
_WORD = re.compile(rf"\(\s*{_PART}(?:\s+{_PART})*\s*\)|[brc](?:{_CUT})?")
_EXAMPLES = 'one word an axis, as in "r c", "b r c", "r c c c", "(b=3 r) c" or "r{512,128} c"'


@dataclass(frozen=True)
class Block:
    """A section of a parameter as `count` matrices of `rows` × `columns`."""

    place: int
    start: int
    length: int
    """The section: `length` entries from `start` of the factor number `place`."""
    factors: tuple[tuple[int, ...], ...]
    """For each axis of the parameter, the sizes of its factors."""
    order: tuple[int, ...]
    """Numbers of the factors over all axes: those of the batch, then of rows, then of columns."""
    batch: tuple[int, ...]
    count: int
    """Number of matrices, the product of `batch`."""
    rows: int
    columns: int
    first: int
    """Number of matrices of the parameter that come before."""
    section: int | None
    """The number of the section; None without sections."""

    @property
    def plain(self) -> bool:
        """True for a 2-D parameter as it is: it needs no view."""
        return self.section is None and len(self.factors) == 2 and self.order == (0, 1)

    def region(self, tensor: Tensor) -> Tensor:
        """Return the section of a tensor shaped like the parameter, (*batch, …r, …c); a view."""
        view = tensor
        for axis in reversed(range(len(self.factors))):
            if len(self.factors[axis]) > 1:
                view = view.unflatten(axis, self.factors[axis])
        if self.section is not None:
            view = view.narrow(self.place, self.start, self.length)
        return view.permute(self.order)

    def matrices(self, tensor: Tensor) -> Tensor:
        """Return the section as (count, rows, columns), a view if the strides allow one."""
        return self.region(tensor).reshape(self.count, self.rows, self.columns)


def default(ndim: int) -> str | None:
    """Return the default spec for a number of dimensions, or None."""
    return {2: "r c", 3: "b r c"}.get(ndim)


@lru_cache(maxsize=4096)
def lines(
    block: Block, box: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[int, Tensor]:
    """Return the axis with sections, and the indices along it of the block's entries in a box.

    The box is (start, stop) for each axis of the parameter.
    """
    axis, place = 0, block.place
    while place >= len(block.factors[axis]):
        axis, place = axis + 1, place - len(block.factors[axis])
    sizes, (start, stop) = block.factors[axis], box[axis]
    every = torch.arange(math.prod(sizes)).view(sizes)
    indices = every.narrow(place, block.start, block.length).flatten()
    return axis, (indices[(indices >= start) & (indices < stop)] - start).to(device)


@lru_cache(maxsize=4096)
def parse(spec: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
    """Return the blocks of a parameter of this shape: one, or one per section."""
    words = _words(spec)
    if len(words) != len(shape):
        raise ValueError(
            f"axes {spec!r} has words for {len(words)} axes, the shape {shape} has {len(shape)}; "
            f"write {_EXAMPLES}"
        )
    factors = tuple(
        _sizes(spec, parts, size, shape) for parts, size in zip(words, shape, strict=True)
    )
    sizes = [size for axis in factors for size in axis]
    cut = [(i, part.sections) for i, part in enumerate(chain(*words)) if part.sections]
    if len(cut) > 1:
        raise ValueError(f"axes {spec!r} has sections twice; only one axis or factor may be cut")
    place, sections = cut[0] if cut else (0, (sizes[0],))
    letters = [part.letter for part in chain(*words)]
    order = tuple(sorted(range(len(letters)), key=lambda i: "brc".index(letters[i])))
    blocks: list[Block] = []
    for start, length in zip(accumulate(sections, initial=0), sections, strict=False):
        sizes[place] = length
        batch, rows, columns = (
            tuple(size for size, name in zip(sizes, letters, strict=True) if name == letter)
            for letter in "brc"
        )
        block = Block(
            place=place,
            start=start,
            length=length,
            factors=factors,
            order=order,
            batch=batch,
            count=math.prod(batch),
            rows=math.prod(rows),
            columns=math.prod(columns),
            first=sum(block.count for block in blocks),
            section=len(blocks) if cut else None,
        )
        blocks.append(block)
    return tuple(blocks)


@dataclass(frozen=True)
class _Part:
    """A factor of an axis: its letter, its size or None, its sections or ()."""

    letter: str
    size: int | None
    sections: tuple[int, ...]

    @classmethod
    def of(cls, letter: str, size: str, cut: str) -> Self:
        """Return the factor that a spec names."""
        sections = tuple(map(int, cut.split(","))) if cut else ()
        return cls(letter, int(size) if size else sum(sections) or None, sections)


def _words(spec: str) -> list[list[_Part]]:
    """Return the factors of each axis."""
    axes: list[list[_Part]] = []
    text = spec.strip()
    while text:
        if (word := _WORD.match(text)) is None:
            raise ValueError(f"axes {spec!r} is invalid at {text!r}; write {_EXAMPLES}")
        axes.append([_Part.of(*part) for part in re.findall(_PART, word[0])])
        text = text[word.end() :].lstrip()
    if {"r", "c"} - {part.letter for parts in axes for part in parts}:
        raise ValueError(f"axes {spec!r} needs rows and columns; write {_EXAMPLES}")
    return axes


def _sizes(spec: str, parts: Sequence[_Part], size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the factors of one axis, computing a missing one."""
    sections = next((part.sections for part in parts if part.sections), ())
    if 0 in sections or (len(parts) == 1 and sections and sum(sections) != size):
        raise ValueError(
            f"axes {spec!r}: the sections {sections} make {sum(sections)} entries, where the shape "
            f"{shape} has {size}; give sizes above 0 that add up"
        )
    product = math.prod(part.size for part in parts if part.size is not None)
    missing = sum(part.size is None for part in parts)
    if missing > 1:
        raise ValueError(f"axes {spec!r}: only one size in parentheses may be missing")
    if product == 0 or size % product or (not missing and product != size):
        raise ValueError(
            f"axes {spec!r} does not multiply out: {product} does not make up {size} of the shape "
            f"{shape}; correct the sizes"
        )
    return tuple(size // product if part.size is None else part.size for part in parts)
