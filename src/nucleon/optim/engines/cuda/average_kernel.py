"""The Triton kernel of the average: W̄ ← W̄ + σ(W − W̄) for all parameters in one launch.

A parameter is cut into chunks; a row of the table has the addresses of a chunk in W and in W̄, and
its number of entries. W is read in its own dtype, W̄ is float32. Whole chunks that begin at
multiples of 16 bytes are moved 16 bytes at a time.
"""
# A compile-time constant is declared as tl.constexpr and given as the value it holds.
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nucleon.linalg.triton_symmetric import TYPES

CHUNK = 4096


@triton.jit
def _pointer(address, TYPE: tl.constexpr, BYTES: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), BYTES)


@triton.jit
def _enter(weight, average, share, at, inside):
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    a = tl.load(average + at, mask=inside)
    tl.store(average + at, a + share * (w - a), mask=inside)


@triton.jit
def enter(table, shares, TYPE: tl.constexpr, CHUNK: tl.constexpr):
    """Enter one chunk of the weights."""
    row = table + tl.program_id(0).to(tl.int64) * 3
    weight, average, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    share, at = tl.load(shares), tl.arange(0, CHUNK)
    if (size == CHUNK) & ((weight | average) % 16 == 0):
        wide, mean = _pointer(weight, TYPE, 16), _pointer(average, tl.float32, 16)
        _enter(wide, mean, share, at, at < CHUNK)
    else:
        narrow = _pointer(weight, TYPE, TYPE.primitive_bitwidth // 8)
        _enter(narrow, _pointer(average, tl.float32, 4), share, at, at < size)


def chunks(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> Tensor:
    """Return the rows of the chunks, (k, 3), on the CPU."""
    columns = (
        [w.data_ptr() for w in weights],
        [a.data_ptr() for a in averages],
        [w.numel() for w in weights],
    )
    first, second, sizes = map(torch.tensor, columns)
    counts = (sizes + CHUNK - 1) // CHUNK
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    starts = (torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]) * CHUNK
    addresses = (first[owners] + starts * weights[0].element_size(), second[owners] + starts * 4)
    return torch.stack((*addresses, (sizes[owners] - starts).clamp_max(CHUNK)), 1)


def run(table: Tensor, share: Tensor, dtype: torch.dtype) -> None:
    """Enter all chunks of a table, of weights of one dtype, with a share in float32."""
    if len(table):
        enter[(len(table),)](table, share, TYPE=TYPES[dtype], CHUNK=CHUNK)
