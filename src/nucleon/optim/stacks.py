"""Same-shape matrices of many parameters as one batch, short side first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The matrices `start`…`stop` of one parameter; a 2-D parameter has one."""

    param: Tensor
    start: int
    stop: int

    def view(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor shaped like the parameter, as (count, m, n) with m ≤ n."""
        matrices = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor
        return short_side_first(matrices[self.start : self.stop])

    def own(self, state: Tensor) -> Tensor:
        """The piece of a state tensor that has one leading entry per matrix."""
        return state[self.start : self.stop]


@dataclass(frozen=True)
class Stack:
    """Pieces whose matrices share one shape, dtype and device: one batched call does them all."""

    pieces: Sequence[Piece]

    def gather(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """Tensors shaped like the parameters, one per piece → (b, m, n) in `dtype`."""
        views = [piece.view(t) for piece, t in zip(self.pieces, tensors, strict=True)]
        return torch.cat(views).to(dtype)

    def gather_own(self, states: Iterable[Tensor]) -> Tensor:
        """State tensors with one leading entry per matrix, one per piece → (b, …)."""
        return torch.cat([p.own(s) for p, s in zip(self.pieces, states, strict=True)])

    def split(self, stacked: Tensor) -> list[Tensor]:
        """(b, …) → one (count, …) view per piece, in order."""
        return list(stacked.split([piece.stop - piece.start for piece in self.pieces]))


def short_side_first(x: Tensor) -> Tensor:
    """`x` or its transpose, whichever has no more rows than columns: the Gram is the small one."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


def matrix_count(param: Tensor) -> int:
    """How many matrices a parameter holds: 1 when 2-D, its leading size when 3-D."""
    return param.shape[0] if param.ndim == 3 else 1


def parameter_names(groups: list[dict[str, Any]]) -> dict[Tensor, str]:
    """The name of each parameter of an optimizer: as given, else its index over all groups."""
    names: dict[Tensor, str] = {}
    for group in groups:
        params = group["params"]
        given = group.get("param_names") or map(str, range(len(names), len(names) + len(params)))
        names |= dict(zip(params, given, strict=True))
    return names


def build(params: Iterable[Tensor], largest: int) -> list[Stack]:
    """Stacks of at most `largest` entries (one matrix at least), in the order of first appearance.

    A 3-D parameter may be cut into pieces; parameters without entries are left out.
    """
    buckets: dict[object, list[Piece]] = {}
    for param in params:
        if param.numel() == 0:
            continue
        rows, columns = param.shape[-2:]
        per_stack = max(1, largest // (rows * columns))
        key = (min(rows, columns), max(rows, columns), param.dtype, param.device)
        count = matrix_count(param)
        for start in range(0, count, per_stack):
            piece = Piece(param, start, min(start + per_stack, count))
            buckets.setdefault(key, []).append(piece)
    return [stack for pieces in buckets.values() for stack in _chunks(pieces, largest)]


def _chunks(pieces: Sequence[Piece], largest: int) -> list[Stack]:
    rows, columns = pieces[0].param.shape[-2:]
    room = largest
    chunk: list[Piece] = []
    done: list[Stack] = []
    for piece in pieces:
        entries = (piece.stop - piece.start) * rows * columns
        if chunk and entries > room:
            done.append(Stack(chunk))
            room, chunk = largest, []
        chunk.append(piece)
        room -= entries
    return [*done, Stack(chunk)]
