"""Which axes of a parameter are rows, columns and batch: a parameter read as matrices.

A spec has one word for each axis, in order:

    "r c"               a Linear weight: rows, columns
    "b r c"             a stack of matrices
    "r c c c"           a convolution kernel: every input channel and tap is a column
    "(b=3 r) c"         queries, keys and values in one weight, the same size each
    "r{512,128,128} c"  the same with unequal sizes: the axis in sections, each its own matrix
    "(b=4 r) c c c"     a convolution in 4 groups

Axes `b` count matrices, axes `r` are flattened into rows and axes `c` into columns, in order. In
parentheses one axis is the product of several, slowest first, of which one may lack its size.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from torch import Tensor

from nucleon._compiler import constant_result

_WORD = re.compile(r"\(([^()]+)\)|([brc])(?:\{(\s*\d+(?:\s*,\s*\d+)*\s*)\})?")
_PART = re.compile(r"([brc])(?:=(\d+))?")
_EXAMPLES = 'one word an axis, as in "r c", "b r c", "r c c c", "(b=3 r) c" or "r{512,128} c"'


@dataclass(frozen=True)
class Block:
    """A section of a parameter as `count` matrices of `rows` × `columns`."""

    axis: int
    start: int
    length: int
    """The section: `length` entries of one axis, from `start`."""
    factors: tuple[tuple[int, ...], ...]
    """For each axis of the section, the sizes it is a product of."""
    order: tuple[int, ...]
    """The factors of all axes, counted in order: those of the batch, of rows, of columns."""
    batch: tuple[int, ...]
    count: int
    """How many matrices there are, the product of `batch`."""
    rows: int
    columns: int
    first: int
    """How many matrices of the parameter come before."""
    section: int | None
    """The number of the section; None where the axis is whole."""

    @property
    def plain(self) -> bool:
        """Whether it is a 2-D parameter as it is: of this no view need be made."""
        return self.section is None and len(self.factors) == 2 and self.order == (0, 1)

    def region(self, tensor: Tensor) -> Tensor:
        """The section of a tensor shaped like the parameter, (*batch, …rows, …columns); a view."""
        view = tensor
        if self.section is not None:
            view = tensor.narrow(self.axis, self.start, self.length)
        for axis in reversed(range(len(self.factors))):
            if len(self.factors[axis]) > 1:
                view = view.unflatten(axis, self.factors[axis])
        return view.permute(self.order)

    def matrices(self, tensor: Tensor) -> Tensor:
        """The section as (count, rows, columns), a view where the strides allow one."""
        return self.region(tensor).reshape(self.count, self.rows, self.columns)


def default(ndim: int) -> str | None:
    """The spec of a parameter that was given none; None where there is no obvious one."""
    return {2: "r c", 3: "b r c"}.get(ndim)


def parse(spec: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
    """The blocks of a parameter of this shape, one unless an axis has sections."""
    return tuple(Block(*fields) for fields in _fields(spec, shape))


@constant_result  # or the compiler would trace the regular expressions
def _fields(spec: str, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    return _cached(spec, shape)


@lru_cache(maxsize=4096)
def _cached(spec: str, shape: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
    return tuple(astuple(block) for block in _parse(spec, shape))


def _parse(spec: str, shape: tuple[int, ...]) -> tuple[Block, ...]:
    words = _words(spec)
    if len(words) != len(shape):
        raise ValueError(
            f"axes {spec!r} has words for {len(words)} axes, the shape {shape} has {len(shape)}; "
            f"write {_EXAMPLES}"
        )
    cut = [axis for axis, (_, sections) in enumerate(words) if sections]
    if len(cut) > 1:
        raise ValueError(f"axes {spec!r} cuts two axes into sections; only one may be cut")
    axis = cut[0] if cut else 0
    sections = words[axis][1] or (shape[axis],)
    if sum(sections) != shape[axis] or (cut and 0 in sections):
        raise ValueError(
            f"axes {spec!r}: the sections {sections} make {sum(sections)} entries, axis {axis} of "
            f"the shape {shape} has {shape[axis]}; give sizes above 0 that add up"
        )
    blocks: list[Block] = []
    for start, length in zip(accumulate(sections, initial=0), sections, strict=False):
        part = (*shape[:axis], length, *shape[axis + 1 :])
        first = sum(block.count for block in blocks)
        section = len(blocks) if cut else None
        blocks.append(_block(spec, words, part, (axis, start, length), (first, section)))
    return tuple(blocks)


_Words = Sequence[tuple[Sequence[tuple[str, int | None]], tuple[int, ...]]]


def _words(spec: str) -> _Words:
    """For each axis its letters with their sizes, and its sections, () where it is whole."""
    found: list[tuple[Sequence[tuple[str, int | None]], tuple[int, ...]]] = []
    text = spec.strip()
    while text:
        word = _WORD.match(text)
        parts = _parts(word) if word else None
        if word is None or parts is None:
            raise ValueError(f"axes {spec!r} cannot be read at {text!r}; write {_EXAMPLES}")
        sections = tuple(map(int, word[3].split(","))) if word[3] else ()
        found.append((parts, sections))
        text = text[word.end() :].lstrip()
    if {"r", "c"} - {letter for parts, _ in found for letter, _ in parts}:
        raise ValueError(f"axes {spec!r} needs rows and columns; write {_EXAMPLES}")
    return found


def _parts(word: re.Match[str]) -> list[tuple[str, int | None]] | None:
    if word[1] is None:
        return [(word[2], None)]
    parts = [_PART.fullmatch(part) for part in word[1].split()]
    if None in parts:
        return None
    return [(part[1], int(part[2]) if part[2] else None) for part in parts if part]


def _block(
    spec: str,
    words: _Words,
    shape: tuple[int, ...],
    extent: tuple[int, int, int],
    place: tuple[int, int | None],
) -> Block:
    factors = tuple(
        _sizes(spec, parts, size, shape) for (parts, _), size in zip(words, shape, strict=True)
    )
    letters = [letter for parts, _ in words for letter, _ in parts]
    sizes = [size for factor in factors for size in factor]
    order = tuple(sorted(range(len(letters)), key=lambda i: "brc".index(letters[i])))

    def of(letter: str) -> tuple[int, ...]:
        return tuple(s for s, name in zip(sizes, letters, strict=True) if name == letter)

    rows, columns = math.prod(of("r")), math.prod(of("c"))
    return Block(*extent, factors, order, of("b"), math.prod(of("b")), rows, columns, *place)


def _sizes(
    spec: str, parts: Sequence[tuple[str, int | None]], size: int, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The sizes of the factors of one axis, the missing one worked out."""
    known = math.prod(n for _, n in parts if n is not None)
    missing = sum(n is None for _, n in parts)
    if missing > 1:
        raise ValueError(f"axes {spec!r}: only one size in parentheses may be missing")
    if known == 0 or size % known or (not missing and known != size):
        raise ValueError(
            f"axes {spec!r} does not multiply out: {known} does not make up {size} of the shape "
            f"{shape}; correct the sizes"
        )
    return tuple(size // known if n is None else n for _, n in parts)
