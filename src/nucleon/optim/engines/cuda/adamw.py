"""AdamW's step in four launches for any number of parameters.

    look      flags of the gradients that exist, and of those with a non-finite square
    (ranks)   the sums of these flags over the ranks of a mesh
    decide    step, skipped and bias corrections of each parameter
    update    m, v and W of the parameters that are stepped

The equations and promises are those of `nucleon.optim.engines.adamw`, which needs some dozens of
launches. The step is elementwise, so the order of the entries does not matter: a parameter, its
moments and its gradient are read as flat memory if they have the same strides. From the second step
on the launches are replayed as a graph, which reads the rate and the addresses of the gradients
from the device. Launches between which ranks communicate are not captured.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from nucleon.optim.engines import adamw
from nucleon.optim.engines.cuda import addresses, engine
from nucleon.optim.engines.cuda.addresses import dense, has_strides, restrided
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Settings, State, Work
from nucleon.optim.matrices import shards

if TYPE_CHECKING:  # it needs Triton
    from nucleon.optim.engines.cuda.adamw_kernels import Tables

EMPTY = 2**61
"""Address of a tensor without entries: a multiple of anything, and never read."""
STATE = ("exp_avg", "exp_avg_sq", "step", "skipped")
Memory = tuple[Sequence[Tensor], ...]
"""Weights, then `STATE`, of each parameter of a bucket."""


class Bucket:
    """Parameters of one dtype on one device and mesh, with their states, kept between steps."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[State]) -> None:
        self.params, self.states = params, states
        self.followed = addresses.Followed["Tables"]()

    def memory(self) -> Memory:
        """Return the tensors of a step, or the parts of them on this rank."""
        tensors = self.params, *([state[name] for state in self.states] for name in STATE)
        if shards.sharded(self.params[0]):
            return tuple([*map(shards.local, each)] for each in tensors)
        return tensors


def serves(params: Sequence[Tensor]) -> bool:
    """Return True if this engine steps some of the parameters; `adamw` steps the others."""
    return any(engine.unreadable(param) is None for param in params)


def refusal(param: Tensor) -> str | None:
    """Return the reason why `adamw` steps a parameter; None if this engine does."""
    gaps = None if dense(shards.local(param)) else "its memory has gaps"
    return engine.unreadable(param) or gaps


def step(work: Work, settings: Settings) -> None:
    """Update the parameters that have a gradient; no host synchronization."""
    if work.cache is None:
        _restride(work)
        work.cache = [
            Bucket([work.params[i] for i in chosen], [work.states[i] for i in chosen])
            for chosen in adamw.buckets(work.params)
        ]
    for bucket in cast(list[Bucket], work.cache):
        if not (serves(bucket.params[:1]) and _step(bucket, settings.group)):
            adamw.update(bucket.params, bucket.states, settings.group)


def _restride(work: Work) -> None:
    """Copy moments into the strides of their parameters, whose memory format may have changed."""
    for param, state in zip(work.params, work.states, strict=True):
        if not shards.sharded(param) and dense(param):
            state |= {name: restrided(state[name], param) for name in ("exp_avg", "exp_avg_sq")}


def _step(bucket: Bucket, group: Mapping[str, Any]) -> bool:
    """Step a bucket; return False, with nothing changed, if the kernels cannot read it."""
    from nucleon.optim.engines.cuda import adamw_kernels as kernels

    first, gradients = bucket.params[0], [p.grad for p in bucket.params]
    meshes = shards.mesh_groups(first) if shards.sharded(first) else []
    if meshes:
        gradients = [None if g is None else shards.local(g) for g in gradients]
    elif not any(g is not None for g in gradients):
        return True
    memory = bucket.memory()
    with torch.cuda.device_of(memory[0][0]):  # Triton launches on the current device
        if torch.cuda.is_current_stream_capturing():  # the caller's graph may outlive the bucket
            tables = _tables(memory)
        else:
            tables = bucket.followed.get(memory, lambda: _tables(memory))
        if tables is None:
            return False
        gradients, dtype = addresses.regular(gradients, memory[0], tables.strides)
        missing = kernels.MISSING.value
        places = [missing if g is None else g.data_ptr() or _address(g) for g in gradients]
        if 0 in places:
            return False
        lr, table = group["lr"], tables.gradients.tensor
        tables.gradients.set(places, lambda: addresses.send(places, table))
        on_device = isinstance(lr, Tensor) and not lr.is_cpu
        tables.lr.fill(lr.reshape(()) if on_device else float(lr))
        sign = -1.0 if group["maximize"] else 1.0
        options = (*group["betas"], group["eps"], group["weight_decay"], sign)
        numbers = kernels.Numbers(dtype, *map(float, options))

        def launch() -> None:
            kernels.look_at(tables, numbers)
            if meshes:
                wire.add_up(tables.counts, meshes, "gradients")
            kernels.move(tables, numbers)

        tables.replay.run(numbers, launch, None if meshes else {}, tables.rows.device)
    return True


def _tables(memory: Memory) -> "Tables | None":
    """Return the tables of parameters and states; None if a tensor is irregular."""
    from nucleon.optim.engines.cuda.adamw_kernels import Tables

    if not all(_regular(*tensors) for tensors in zip(*memory, strict=True)):
        return None
    params = memory[0]
    starts = [[_address(tensor) for tensor in tensors] for tensors in memory]
    ends = [start + p.nbytes for start, p in zip(starts[0], params, strict=True)]
    rows = list(zip(*starts, ends, strict=True))
    table = addresses.table([*chain.from_iterable(rows)], params[0].device).view(len(rows), -1)
    return Tables(table, params)


def _regular(param: Tensor, first: Tensor, second: Tensor, *counts: Tensor) -> bool:
    """Return True if the kernels can read a parameter and its state as flat memory."""
    return (
        dense(param)
        and all(
            m.dtype == torch.float32 and has_strides(m, param.shape, param.stride())
            for m in (first, second)
        )
        and all(n.dtype == torch.int64 and n.numel() == 1 for n in counts)
        and all(x.device == param.device and _address(x) for x in (param, first, second, *counts))
    )


def _address(tensor: Tensor) -> int:
    """Return the address of the first entry; 0 for subclasses without storage."""
    return EMPTY if not tensor.numel() else tensor.data_ptr()
