"""AdamW's step in four launches, however many parameters there are.

    look      which gradients are there, and which have a square that is not finite
    (ranks)   the same on all that hold a part of a parameter
    decide    step and skipped of each parameter, and its bias corrections
    update    m, v and W of those that are taken

The equations and promises are those of `nucleon.optim.engines.adamw`, which does the same in some
dozens of launches. It is elementwise, so the order of the entries does not matter: a parameter, its
moments and its gradient are followed as flat memory where they have the same strides. From the
second step on the launches are a graph, which reads the rate and the addresses of the gradients
where they lie on the device; ranks that talk in between launch one by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon.optim.engines import adamw
from nucleon.optim.engines.cuda import engine, pointers
from nucleon.optim.engines.cuda.capture import captured
from nucleon.optim.engines.cuda.layout import dense, has_strides, restrided
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Settings, State, Work
from nucleon.optim.matrices import shards

if TYPE_CHECKING:  # it needs Triton
    from nucleon.optim.engines.cuda.adamw_kernels import Numbers, Tables

EMPTY = 2**61
"""In place of the address of what has no entries: a multiple of anything, and never read."""
STATE = ("exp_avg", "exp_avg_sq", "step", "skipped")
Memory = tuple[Sequence[Tensor], ...]
"""Weights, then `STATE`, of each parameter of a bucket: what this rank holds of them."""


@dataclass
class Bucket:
    """Parameters of one dtype on one device and mesh, and what is known of their memory."""

    params: Sequence[Tensor]
    states: Sequence[State]
    memory: Memory = ()
    """The tensors that `tables` were made of."""
    seen: Sequence[int] = ()
    """Their addresses."""
    strides: tuple[tuple[int, ...], ...] = ()
    """Of the weights."""
    tables: "Tables | None" = None
    """Where parameters and states lie; None where the kernels cannot follow."""
    addresses: Sequence[int] = ()
    """Of the last gradients."""
    gradients: Tensor | None = None
    """`addresses` on the device."""
    lr: object = None
    """What `tables.lr` holds, where the host knows it."""
    known: "Numbers | None" = None
    """The options of the last step, and of the graph."""
    graph: torch.cuda.CUDAGraph | None = None
    fails: bool = False
    """Whether no graph could be made."""


class Buckets(list[Bucket]):
    """What this engine keeps of a piece of work between steps."""


def serves(params: Sequence[Tensor]) -> bool:
    """Whether this engine steps some of the parameters; the others it hands over."""
    return any(engine.unreadable(param) is None for param in params)


def refusal(param: Tensor) -> str | None:
    """Why this engine hands a parameter over; None where it steps it."""
    gaps = None if dense(shards.local(param)) else "its memory has gaps"
    return engine.unreadable(param) or gaps


def step(work: Work, settings: Settings) -> None:
    """One step of the parameters that have a gradient; no host synchronization."""
    if not isinstance(work.cache, Buckets):
        _restride(work)
        work.cache = Buckets(
            Bucket([work.params[i] for i in chosen], [work.states[i] for i in chosen])
            for bucket in adamw.buckets(work.params)
            for chosen in _split_by_gaps(work.params, bucket)
        )
    for bucket in work.cache:
        if not (serves(bucket.params[:1]) and _step(bucket, settings.group)):
            adamw.update(bucket.params, bucket.states, settings.group)


def _restride(work: Work) -> None:
    """Give all moments the strides of their parameters, whose memory format may have changed."""
    for param, state in zip(work.params, work.states, strict=True):
        if not shards.sharded(param) and dense(param):
            state |= {name: restrided(state[name], param) for name in ("exp_avg", "exp_avg_sq")}


def _split_by_gaps(params: Sequence[Tensor], chosen: Sequence[int]) -> list[list[int]]:
    """Those whose memory has no gaps, and the others; DTensors together: ranks must not differ."""
    if shards.sharded(params[chosen[0]]):
        return [[*chosen]]
    found = [i for i in chosen if dense(params[i])], [i for i in chosen if not dense(params[i])]
    return [part for part in found if part]


def _step(bucket: Bucket, group: Mapping[str, Any]) -> bool:
    """The step of a bucket; False, with nothing changed, where the kernels cannot follow."""
    from nucleon.optim.engines.cuda import adamw_kernels as kernels

    first, gradients = bucket.params[0], [p.grad for p in bucket.params]
    if shards.sharded(first):
        gradients = [None if g is None else shards.local(g) for g in gradients]
    elif not any(g is not None for g in gradients):
        return True
    memory = _memory(bucket)
    with torch.cuda.device_of(memory[0][0]):  # Triton launches on the current device
        tables = _tables(bucket, memory)
        gradients, dtype = pointers.regular(gradients, memory[0], bucket.strides)
        missing = kernels.MISSING.value
        addresses = [missing if g is None else g.data_ptr() or _address(g) for g in gradients]
        if tables is None or 0 in addresses:
            return False
        table = _gradient_table(bucket, addresses, first.device)
        _set_rate(bucket, tables, group["lr"])
        numbers = kernels.Numbers.of(group, dtype)
        if shards.sharded(first):
            kernels.look_at(tables, table, numbers)
            wire.add_up(tables.counts, shards.mesh_groups(first), "gradients")
            kernels.move(tables, table, numbers)
        else:
            _launch(bucket, tables, table, numbers)
    return True


def _launch(bucket: Bucket, tables: "Tables", table: Tensor, numbers: "Numbers") -> None:
    """All launches of a step: those of the first one by one, then captured, then replayed."""
    from nucleon.optim.engines.cuda import adamw_kernels as kernels

    def run() -> None:
        kernels.look_at(tables, table, numbers)
        kernels.move(tables, table, numbers)

    if not table.is_cuda or torch.cuda.is_current_stream_capturing():
        return run()
    if bucket.known != numbers:  # an option that changes at every step makes no graph
        bucket.known, bucket.graph = numbers, None
        return run()
    if bucket.graph is None and not bucket.fails:
        bucket.graph = captured(run, torch.cuda.Stream(table.device))
        bucket.fails = bucket.graph is None
    return run() if bucket.graph is None else bucket.graph.replay()


# ---------------------------------------------------------------------- where it all lies


def _memory(bucket: Bucket) -> Memory:
    found = bucket.params, *([own[name] for own in bucket.states] for name in STATE)
    if shards.sharded(bucket.params[0]):
        return tuple([shards.local(tensor) for tensor in tensors] for tensors in found)
    return found


def _tables(bucket: Bucket, memory: Memory) -> "Tables | None":
    """Where parameters and states lie; None where the kernels cannot follow.

    They are kept, as to find them again costs a step its time. A graph that the caller captures
    has its own: it may outlive the bucket.
    """
    if torch.cuda.is_current_stream_capturing():
        return _new_tables(memory)
    # What lies where a tensor that is kept lay is that tensor; another stride makes a new list.
    seen = [*map(Tensor.data_ptr, chain(*memory))]
    if bucket.seen != seen:
        bucket.tables, bucket.memory, bucket.seen = _new_tables(memory), memory, seen
        bucket.strides = tuple(map(Tensor.stride, memory[0]))
        bucket.lr = bucket.known = bucket.graph = None
    return bucket.tables


def _new_tables(memory: Memory) -> "Tables | None":
    from nucleon.optim.engines.cuda.adamw_kernels import Tables

    params, *states = memory
    dtype, device = params[0].dtype, params[0].device
    if not all(_regular(*tensors) for tensors in zip(*memory, strict=True)):
        return None
    starts = [[_address(tensor) for tensor in tensors] for tensors in (params, *states)]
    ends = [start + p.nbytes for start, p in zip(starts[0], params, strict=True)]
    rows = list(zip(*starts, ends, strict=True))
    table = pointers.table([*chain.from_iterable(rows)], device)
    return Tables.of(table.view(len(rows), -1), [p.numel() for p in params], dtype)


def _regular(param: Tensor, first: Tensor, second: Tensor, *counts: Tensor) -> bool:
    """Whether the kernels can follow a parameter and its state as flat memory."""
    tensors = (param, first, second, *counts)
    return (
        dense(param)
        and all(
            m.dtype == torch.float32 and has_strides(m, param.shape, param.stride())
            for m in (first, second)
        )
        and all(n.dtype == torch.int64 and n.numel() == 1 for n in counts)
        and all(x.device == param.device and _address(x) for x in tensors)
    )


def _address(tensor: Tensor) -> int:
    """Where it begins; 0 for subclasses without a storage of their own."""
    return EMPTY if not tensor.numel() else tensor.data_ptr()


def _gradient_table(bucket: Bucket, addresses: list[int], device: torch.device) -> Tensor:
    """The addresses of gradients on the device: the last ones, or sent there."""
    if torch.cuda.is_current_stream_capturing():
        return pointers.table(addresses, device)
    if bucket.gradients is None:
        bucket.gradients = pointers.table(addresses, device)
    elif bucket.addresses != addresses:
        pointers.send(addresses, bucket.gradients)
    bucket.addresses = addresses
    return bucket.gradients


def _set_rate(bucket: Bucket, tables: "Tables", lr: float | Tensor) -> None:
    """Let the tables have this rate; one on the CPU is read at once, as a number."""
    if isinstance(lr, Tensor) and not lr.is_cpu:
        tables.lr.copy_(lr.reshape(()))
        bucket.lr = None
    elif tables is not bucket.tables or bucket.lr != float(lr):  # those of a graph are new
        tables.lr.fill_(float(lr))
        if tables is bucket.tables:
            bucket.lr = float(lr)
