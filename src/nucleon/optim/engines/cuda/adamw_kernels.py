"""The Triton kernels of AdamW's step over all parameters at once, see `adamw`; and of the average.

A parameter is cut into chunks. Chunk c is number `numbers[c]` of the parameter `owners[c]`; its row
of `rows` has the addresses of weights, m, v, step and skipped, and the end of its weights. Chunks
at multiples of 4 entries are moved 4 entries at a time, others one by one.
"""
# A compile-time constant is declared as tl.constexpr and passed as a plain value.
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nucleon.linalg.triton_symmetric import TYPES
from nucleon.optim.engines.cuda.replay import Input, Replay

CHUNK, PART, FEW = 8192, 1024, 128
"""Entries per program of `look` and of `update`; parameters per program of `decide`."""
AVERAGED = 4096
"""Entries per program of `enter`."""
FIELDS = tl.constexpr(6)
MISSING = tl.constexpr(2**62)
"""Address that stands for a missing gradient."""


@triton.jit
def _place(chunk, rows, gradients, owners, numbers, WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """Return the parameter of a chunk, its row and gradient, its first entry and those left."""
    owner = tl.load(owners + chunk).to(tl.int64)
    start = tl.load(numbers + chunk).to(tl.int64) * CHUNK
    row = rows + owner * FIELDS
    size = (tl.load(row + 5) - tl.load(row)) // (WEIGHT.primitive_bitwidth // 8)
    return owner, row, tl.load(gradients + owner), start, size - start


@triton.jit
def _entries(address, start, TYPE: tl.constexpr, WIDTH: tl.constexpr):
    """Return a pointer to entry `start` from an address, which is a multiple of WIDTH entries."""
    first = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(first, WIDTH * (TYPE.primitive_bitwidth // 8)) + start


@triton.jit
def _aligned(address, TYPE: tl.constexpr, WIDTH: tl.constexpr):
    return address % (WIDTH * (TYPE.primitive_bitwidth // 8)) == 0


@triton.jit
def _overflows(gradient, start, left, TYPE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Return 1 if a square of the chunk is not finite in float32, else 0."""
    at = tl.arange(0, CHUNK)
    inside = at < left // WIDTH * WIDTH
    g = tl.load(_entries(gradient, start, TYPE, WIDTH) + at, mask=inside, other=0.0)
    g = g.to(tl.float32)
    return tl.max(tl.where(g * g < float("inf"), 0, 1))


@triton.jit(do_not_specialize=["count"])
def look(
    rows, gradients, owners, numbers, counts, count,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store counts (2, k): 1 for a parameter with a gradient; 1 for a non-finite square."""
    owner, _, gradient, start, left = _place(
        tl.program_id(0), rows, gradients, owners, numbers, WEIGHT, CHUNK
    )
    if gradient != MISSING:
        some = tl.minimum(left, CHUNK).to(tl.int32)
        WIDTH: tl.constexpr = 128 // GRADIENT.primitive_bitwidth
        if _aligned(gradient, GRADIENT, WIDTH) & (some % WIDTH == 0):
            bad = _overflows(gradient, start, some, GRADIENT, WIDTH, CHUNK)
        else:
            bad = _overflows(gradient, start, some, GRADIENT, 1, CHUNK)
        tl.store(counts + owner, 1.0, mask=start == 0)
        tl.store(counts + count + owner, 1.0, mask=bad != 0)


@triton.jit(do_not_specialize=["count"])
def decide(
    rows, counts, factors, lr, count, log_beta1: tl.float64, log_beta2: tl.float64,
    decay: tl.float64, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count steps and skipped gradients; store the factors (k, 4) of the parameters.

    They are 1 for a step and 0 for none, lr/(1−β₁ᵗ), √(1−β₂ᵗ), 1 − lr·decay; computed in float64,
    since float32 would lose four digits of 1−β₂ᵗ at β₂ = 0.999.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    there = tl.load(counts + i, mask=inside, other=0.0) > 0
    finite = tl.load(counts + count + i, mask=inside, other=0.0) == 0
    row = rows + i * FIELDS
    step = tl.load(row + 3, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    skipped = tl.load(row + 4, mask=inside, other=0).to(tl.pointer_type(tl.int64))
    taken, left_out = there & finite, there & (finite == 0)
    t = tl.load(step, mask=taken, other=0) + 1
    tl.store(step, t, mask=taken)
    tl.store(skipped, tl.load(skipped, mask=left_out, other=0) + 1, mask=left_out)

    rate = tl.load(lr)
    t = t.to(tl.float64)
    here = factors + i * 4
    tl.store(here, tl.where(taken, 1.0, 0.0), mask=inside)
    tl.store(here + 1, (rate / (1.0 - tl.exp(t * log_beta1))).to(tl.float32), mask=inside)
    tl.store(here + 2, tl.sqrt(1.0 - tl.exp(t * log_beta2)).to(tl.float32), mask=inside)
    kept = tl.full((BLOCK,), 1.0, tl.float64) - rate * decay
    tl.store(here + 3, kept.to(tl.float32), mask=inside)


@triton.jit
def _move(
    gradient, first, second, weight, start, left, rate, root, kept, sign, blend, keep, enter, eps,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    GRADIENT_WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Step a part of a chunk; each number is read once and written once."""
    at = tl.arange(0, PART)
    inside = at < left // WIDTH * WIDTH
    there = inside & (gradient != MISSING)  # it may be on another rank only
    gradient = _entries(gradient, start, GRADIENT, GRADIENT_WIDTH) + at
    first = _entries(first, start, tl.float32, WIDTH) + at
    second = _entries(second, start, tl.float32, WIDTH) + at
    weight = _entries(weight, start, WEIGHT, WIDTH) + at
    g = tl.load(gradient, mask=there, other=0.0, eviction_policy="evict_first")
    m = tl.load(first, mask=inside, other=0.0, eviction_policy="evict_first")
    v = tl.load(second, mask=inside, other=0.0, eviction_policy="evict_first")
    w = tl.load(weight, mask=inside, other=0.0, eviction_policy="evict_first")
    g = g.to(tl.float32) * sign
    # As torch's lerp, from the nearer end: with β₁ = 0, m is g.
    m = tl.where(blend < 0.5, m + blend * (g - m), g - (1.0 - blend) * (g - m))
    v = keep * v + enter * g * g
    size = tl.div_rn(tl.sqrt_rn(v), root) + eps
    change = tl.where(size > 0, tl.div_rn(rate * m, size), 0.0)  # with ε = 0, v may be 0
    w = kept * w.to(tl.float32) - change
    tl.store(first, m, mask=inside, eviction_policy="evict_first")
    tl.store(second, v, mask=inside, eviction_policy="evict_first")
    tl.store(weight, w.to(WEIGHT), mask=inside, eviction_policy="evict_first")


@triton.jit
def update(
    rows, gradients, owners, numbers, factors, sign, blend, keep, enter, eps,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Step the taken parameters, the last first: `look` has left its gradient in the cache."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    each: tl.constexpr = CHUNK // PART
    owner, row, gradient, start, left = _place(
        part // each, rows, gradients, owners, numbers, WEIGHT, CHUNK
    )
    start += part % each * PART
    left -= part % each * PART
    here = factors + owner * 4
    rate, root, kept = tl.load(here + 1), tl.load(here + 2), tl.load(here + 3)
    weight, first, second = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    aligned = _aligned(weight, WEIGHT, 4) & _aligned(first | second, tl.float32, 4)
    if (tl.load(here) != 0) & (left > 0):
        some = tl.minimum(left, PART).to(tl.int32)
        if aligned & (some % 4 == 0):
            if _aligned(gradient, GRADIENT, 4):
                _move(
                    gradient, first, second, weight, start, some, rate, root, kept,
                    sign, blend, keep, enter, eps, GRADIENT, WEIGHT, 4, 4, PART,
                )  # fmt: skip
            else:  # as in a flat buffer of gradients
                _move(
                    gradient, first, second, weight, start, some, rate, root, kept,
                    sign, blend, keep, enter, eps, GRADIENT, WEIGHT, 4, 1, PART,
                )  # fmt: skip
        else:
            _move(
                gradient, first, second, weight, start, some, rate, root, kept,
                sign, blend, keep, enter, eps, GRADIENT, WEIGHT, 1, 1, PART,
            )  # fmt: skip


@triton.jit
def _enter(weight, average, share, at, inside):
    w = tl.load(weight + at, mask=inside).to(tl.float32)
    a = tl.load(average + at, mask=inside)
    tl.store(average + at, a + share * (w - a), mask=inside)


@triton.jit
def enter(table, shares, TYPE: tl.constexpr, CHUNK: tl.constexpr):
    """Update W̄ ← W̄ + σ(W − W̄) of a chunk; W is read in its own dtype, W̄ is float32.

    A row of the table has the addresses of the chunk in W and in W̄, and its number of entries.
    Whole chunks that begin at multiples of 16 bytes are moved 16 bytes at a time.
    """
    row = table + tl.program_id(0).to(tl.int64) * 3
    weight, average, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    share, at = tl.load(shares), tl.arange(0, CHUNK)
    WIDTH: tl.constexpr = 128 // TYPE.primitive_bitwidth
    if (size == CHUNK) & ((weight | average) % 16 == 0):
        wide, mean = _entries(weight, 0, TYPE, WIDTH), _entries(average, 0, tl.float32, 4)
        _enter(wide, mean, share, at, at < CHUNK)
    else:
        narrow, mean = _entries(weight, 0, TYPE, 1), _entries(average, 0, tl.float32, 1)
        _enter(narrow, mean, share, at, at < size)


# ---------------------------------------------------------------------- their launches


class Numbers(NamedTuple):
    """The options of a step that seldom change, with the dtype of its gradients."""

    gradient: torch.dtype
    beta1: float
    beta2: float
    eps: float
    decay: float
    sign: float
    """−1 to maximize."""


class Tables:
    """Tables, buffers, inputs and graph of a step, for k parameters of one dtype in n chunks.

    `rows` is (k, FIELDS) int64, see the module.
    """

    def __init__(self, rows: Tensor, weights: Sequence[Tensor]) -> None:
        self.rows, self.weight = rows, weights[0].dtype
        self.strides = tuple(map(Tensor.stride, weights))
        # An empty parameter has a chunk, too. The sizes are also computed on the device.
        count = sum(max(1, -(-weight.numel() // CHUNK)) for weight in weights)
        entries = (rows[:, 5] - rows[:, 0]) // self.weight.itemsize
        owners, numbers = _chunks(entries.clamp(min=1), CHUNK, count)
        self.owners, self.numbers = owners.int(), numbers.int()
        """(n,): the parameter of each chunk, and its number in it."""
        self.gradients = Input(rows.new_empty(len(rows)))
        """(k,): addresses of the gradients."""
        self.counts = rows.new_empty((2, len(rows)), dtype=torch.float32)
        """Written by `look`."""
        self.factors = rows.new_empty((len(rows), 4), dtype=torch.float32)
        """Written by `decide`."""
        self.lr = Input(rows.new_empty((), dtype=torch.float64))
        """The rate, which a graph reads from the device."""
        self.replay = Replay()


def _chunks(sizes: Tensor, most: int, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the owner of each chunk of at most `most` entries, and its number in the owner.

    `count`, the number of chunks, saves a synchronization.
    """
    chunks, each = -(-sizes // most), {"device": sizes.device}
    owners = torch.arange(len(sizes), **each).repeat_interleave(chunks, output_size=count)
    return owners, torch.arange(len(owners), **each) - (chunks.cumsum(0) - chunks)[owners]


def look_at(tables: Tables, numbers: Numbers) -> None:
    """Launch `look` on the gradients, which writes the counts."""
    tables.counts.zero_()
    look[(len(tables.owners),)](
        tables.rows, tables.gradients.tensor, tables.owners, tables.numbers, tables.counts,
        len(tables.rows), GRADIENT=TYPES[numbers.gradient], WEIGHT=TYPES[tables.weight],
        CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip


def move(tables: Tables, numbers: Numbers) -> None:
    """Launch `decide` on the counts of all ranks, and `update`."""
    count = len(tables.rows)
    logs = [math.log(beta) if beta else -math.inf for beta in (numbers.beta1, numbers.beta2)]
    decide[(triton.cdiv(count, FEW),)](
        tables.rows, tables.counts, tables.factors, tables.lr.tensor, count, *logs, numbers.decay,
        BLOCK=FEW,
    )  # fmt: skip
    update[(len(tables.owners) * (CHUNK // PART),)](
        tables.rows, tables.gradients.tensor, tables.owners, tables.numbers, tables.factors,
        numbers.sign, 1 - numbers.beta1, numbers.beta2, 1 - numbers.beta2, numbers.eps,
        GRADIENT=TYPES[numbers.gradient], WEIGHT=TYPES[tables.weight], CHUNK=CHUNK, PART=PART,
    )  # fmt: skip


def average_table(weights: Sequence[Tensor], averages: Sequence[Tensor]) -> Tensor:
    """Return the rows of `enter`, (n, 3), on the CPU; the weights have one dtype."""
    pairs = zip(weights, averages, strict=True)
    rows = torch.tensor([(w.data_ptr(), a.data_ptr(), w.numel()) for w, a in pairs], device="cpu")
    owners, numbers = _chunks(rows[:, 2], AVERAGED)
    starts = numbers * AVERAGED
    first, second, sizes = rows[owners].unbind(1)
    addresses = (first + starts * weights[0].itemsize, second + starts * averages[0].itemsize)
    return torch.stack((*addresses, (sizes - starts).clamp_max(AVERAGED)), 1)


def enter_average(table: Tensor, share: Tensor, dtype: torch.dtype) -> None:
    """Enter the weights of a table, of one dtype, with a share in float32."""
    if len(table):
        enter[(len(table),)](table, share, TYPE=TYPES[dtype], CHUNK=AVERAGED)
