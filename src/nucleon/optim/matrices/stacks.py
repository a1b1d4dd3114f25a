"""Same-shape matrices of many parameters as one batch, short side first."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.optim.matrices import shards
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import blocks

LARGEST_GRID = 65535
"""Matrices in a stack at most: a kernel has one program or more for each, along its second axis."""
Capacity = Callable[[Tensor, Block], int]
"""(parameter, block) → most entries of a stack of such matrices."""
Key = Callable[[Tensor, Block], object]
"""(parameter, block) → a key that a stack shares besides shape, dtype, device and sharding."""


@dataclass(frozen=True)
class Piece:
    """The matrices `start`…`stop` of one block of a parameter."""

    param: Tensor
    block: Block
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.stop - self.start

    def matrices(self, tensor: Tensor) -> Tensor:
        """Return the piece of a tensor shaped like the parameter, as (count, rows, columns)."""
        return _cut(self.block.matrices(tensor), self.start, self.stop)

    def region(self, tensor: Tensor) -> Tensor:
        """Return the piece as (*batch, …rows, …columns): always a view, to be written to."""
        view = self.block.region(tensor)
        if self.count == self.block.count:
            return view
        inner = self.block.count // self.block.batch[0]
        return view[self.start // inner : self.stop // inner]

    def own(self, state: Tensor) -> Tensor:
        """Return the piece of a state tensor with an entry for each matrix of the parameter."""
        return _cut(state, self.block.first + self.start, self.block.first + self.stop)

    def gram(self, state: Mapping[str, Tensor], prefix: str = "") -> Tensor:
        """Return the Gram matrices of the piece, (count, m, m)."""
        return _cut(state[prefix + gram_key(self.block)], self.start, self.stop)

    def names(self, name: str) -> list[str]:
        """Return a name for each matrix; a single matrix has the name of the parameter."""
        if self.block.count == 1 and self.block.section is None:
            return [name]
        return [f"{name}.{self.block.first + i}" for i in range(self.start, self.stop)]


@dataclass(frozen=True)
class Stack:
    """Pieces whose matrices share one shape, dtype and device: one batched call does them all."""

    pieces: Sequence[Piece]

    @cached_property
    def params(self) -> list[Tensor]:
        """The parameter of each piece; one cut into pieces appears more than once."""
        return [piece.param for piece in self.pieces]

    @cached_property
    def plain(self) -> bool:
        """True if each piece is a 2-D parameter as it is, which saves a step the views."""
        return all(piece.block.plain for piece in self.pieces)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the parameters."""
        return self.pieces[0].block.rows, self.pieces[0].block.columns

    @cached_property
    def tall(self) -> bool:
        """True if the matrices are transposed, so that the short side comes first."""
        return self.shape[0] > self.shape[1]

    @cached_property
    def kind(self) -> tuple[int, int, torch.dtype]:
        """Rows, columns and dtype of the parameters."""
        return (*self.shape, self.params[0].dtype)

    @cached_property
    def work_dtype(self) -> torch.dtype:
        """Dtype of the computation."""
        return _checks.work_dtype(self.params[0].dtype)

    @cached_property
    def counts(self) -> list[int]:
        """Number of matrices of each piece."""
        return [piece.count for piece in self.pieces]

    @cached_property
    def count(self) -> int:
        """Number of matrices."""
        return sum(self.counts)

    def gather(self, tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Stack tensors shaped like the parameters, one per piece → (b, m, n), m ≤ n.

        `dtype` is `work_dtype` by default.
        """
        if self.plain:
            stacked = torch.stack([*tensors])
        else:
            both = zip(self.pieces, tensors, strict=True)
            stacked = torch.cat([piece.matrices(tensor) for piece, tensor in both])
        stacked = stacked.to(dtype or self.work_dtype)
        return stacked.mT if self.tall else stacked

    def regions(
        self, tensors: Iterable[Tensor], stacked: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the regions of such tensors that (b, m, n) fills, and its parts for them."""
        natural = (stacked.mT if self.tall else stacked).contiguous()
        if self.plain:
            return [*tensors], [*natural.unbind()]
        parts = natural.split(self.counts)
        regions = [piece.region(t) for piece, t in zip(self.pieces, tensors, strict=True)]
        return regions, [p.reshape(r.shape) for p, r in zip(parts, regions, strict=True)]

    def boxes(self, stacked: Tensor) -> list[Tensor]:
        """Cut (b, m, n) into a tensor per piece, shaped like this rank's shard of its parameter.

        Entries that belong to other pieces are 0.
        """
        whole = zip(self.whole(stacked), self.params, strict=True)
        return [w[shards.box(param)] for w, param in whole]

    def whole(self, stacked: Tensor) -> list[Tensor]:
        """Cut (b, m, n) into a tensor per piece, shaped like its parameter, 0 outside the piece."""
        if self.plain:
            return [*(stacked.mT if self.tall else stacked).unbind()]
        tensors = [stacked.new_zeros(param.shape) for param in self.params]
        self.scatter(stacked, tensors)
        return tensors

    def scatter(self, stacked: Tensor, tensors: Iterable[Tensor]) -> None:
        """Write (b, m, n) into tensors shaped like the parameters, one per piece."""
        torch._foreach_copy_(*self.regions(tensors, stacked))

    def gather_own(self, states: Iterable[Tensor]) -> Tensor:
        """Stack state tensors with one entry per matrix, one per piece → (b, …)."""
        return torch.cat(self.own(states))

    def scatter_own(self, stacked: Tensor, states: Iterable[Tensor]) -> None:
        """Write (b, …) into state tensors with one entry per matrix, one per piece."""
        torch._foreach_copy_(self.own(states), stacked.split(self.counts))

    def own(self, states: Iterable[Tensor]) -> list[Tensor]:
        """Return the part of each piece of state tensors with one entry per matrix; views."""
        if self.plain:
            return [*states]
        return [p.own(s) for p, s in zip(self.pieces, states, strict=True)]

    def grams(self, states: Iterable[Mapping[str, Tensor]], prefix: str = "") -> list[Tensor]:
        """Return views of each piece's Gram matrices (count, m, m); `prefix` is of their keys."""
        if self.plain:
            return [*map(itemgetter(f"{prefix}gram"), states)]
        return [p.gram(s, prefix) for p, s in zip(self.pieces, states, strict=True)]

    def mask(self, flags: Sequence[bool]) -> Tensor:
        """Expand a flag per piece to one per matrix, (b,), without a copy from the host."""
        device, each = self.params[0].device, zip(flags, self.counts, strict=True)
        return torch.cat([torch.full((count,), flag, device=device) for flag, count in each])

    def per_matrix(self, flags: Tensor) -> Tensor:
        """Return the mask of flags that are on the device, one per piece."""
        each = zip(flags.unbind(), self.counts, strict=True)
        return torch.cat([flag.expand(count) for flag, count in each])


def _cut(x: Tensor, start: int, stop: int) -> Tensor:
    """Return x[start:stop], or x itself if that is all of it, in a tenth of the time."""
    return x if x.shape[0] == stop - start else x[start:stop]


def short_side_first(x: Tensor) -> Tensor:
    """Return `x` or its transpose, with no more rows than columns, for the smaller Gram matrix."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


def gram_key(block: Block) -> str:
    """Return the key of the Gram matrices of a block in the state."""
    return "gram" if block.section is None else f"gram.{block.section}"


def build(
    params: Iterable[tuple[Tensor, str | None]],
    capacity: Capacity,
    *,
    key_of: Key = lambda param, block: None,
    cut: bool = True,
) -> list[Stack]:
    """Return stacks of at most `capacity` entries, one matrix at least, in order of appearance.

    With `cut`, a larger batch of matrices is cut into pieces of about equal size. Parameters
    without entries are left out.
    """
    buckets: dict[object, list[tuple[Tensor, Block]]] = {}
    for param, spec in params:
        for block in blocks(param, spec) if param.numel() else ():
            shape = (block.rows, block.columns)
            key = (shape, param.dtype, param.device, shards.sharding(param), key_of(param, block))
            buckets.setdefault(key, []).append((param, block))
    built: list[Stack] = []
    for pairs in buckets.values():
        _, block = pairs[0]
        most = min(capacity(*pair) for pair in pairs) // (block.rows * block.columns)
        most = min(max(1, most), LARGEST_GRID)
        built += _chunks([piece for pair in pairs for piece in _pieces(*pair, most, cut)], most)
    return built


def _pieces(param: Tensor, block: Block, most: int, cut: bool) -> list[Piece]:
    """Cut a block into as few pieces as possible, of at most `most` matrices and similar size."""
    # Only the first axis of the batch is cut, so that every piece is a view of the parameter.
    first = block.batch[0] if block.batch else 1
    inner = block.count // first
    parts = math.ceil(first / max(1, most // inner)) if cut else 1
    step = math.ceil(first / parts) * inner
    return [
        Piece(param, block, start, min(start + step, block.count))
        for start in range(0, block.count, step)
    ]


def _chunks(pieces: Sequence[Piece], most: int) -> list[Stack]:
    """Return few stacks of at most `most` matrices, in order, the last one the smallest."""
    counts = [piece.count for piece in pieces]
    fewest = math.ceil(sum(counts) / most)
    # A stack that is full to within one piece has its share, so the number stays the fewest.
    limit = min(most, math.ceil(sum(counts) / fewest) + max(counts) - 1)
    room, chunks = limit, cast(list[list[Piece]], [[]])
    for piece in pieces:
        if chunks[-1] and piece.count > room:
            chunks.append([])
            room = limit
        chunks[-1].append(piece)
        room -= piece.count
    return [Stack(chunk) for chunk in chunks]
