"""placement="owner": each matrix is computed by one rank, which keeps its state."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon.optim.engines import reference
from nucleon.optim.engines.ranks import wire
from nucleon.optim.engines.work import Matrices, Settings, Work
from nucleon.optim.matrices import axes, shards
from nucleon.optim.matrices.shards import Box
from nucleon.optim.matrices.stacks import Piece, Stack


@dataclass
class Task:
    """A stack whose gradients are sent to its owner, and whose direction is sent back."""

    owner: int
    work: Matrices
    inbox: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Flat tensor from each rank: its boxes of the gradients, then a flag per piece."""
    outcome: Tensor = field(default_factory=lambda: torch.empty(0))
    """Flat: the direction, or this rank's boxes of it, then the mask of stepped matrices."""

    @property
    def stack(self) -> Stack:
        """The matrices."""
        return self.work.stack


@dataclass
class Owned(Work):
    """The matrices of a group, each stepped by its owner."""

    rounds: Sequence[Sequence[Task]]
    """The i-th stack of every rank, for i = 0, 1, …; equal on all ranks, whatever has gradients."""


def step(work: Owned, settings: Settings) -> None:
    """Step rounds of one stack per rank: collect the next round, and send while it is computed."""
    rounds = work.rounds
    collected = _collect(rounds[0] if rounds else ())
    under_way: tuple[Sequence[Task], Sequence[Callable[[], None]]] = ([], [])
    for tasks, following in zip_longest(rounds, rounds[1:], fillvalue=()):
        collected()
        collected = _collect(following)
        for task in tasks:
            if task.owner == dist.get_rank():
                _compute(task, settings)
                task.inbox.clear()  # tasks outlive the step, and should not keep gradients
        sent = _distribute(tasks, settings.group)
        _finish(settings, *under_way)
        under_way = (tasks, sent)
    _finish(settings, *under_way)


def _collect(tasks: Sequence[Task]) -> Callable[[], None]:
    """Start sending this rank's gradients to their owners; return a function that waits."""
    me = dist.get_rank()
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    for task in tasks:
        layout = shards.of(task.stack.params[0])
        members = layout.replica_of(task.owner) if layout else [task.owner]
        if me not in members:
            continue
        mine = _held_gradients(task.stack)
        if me != task.owner:
            sends.append((task.owner, mine))
            continue
        for rank in members:
            size = _size(task.stack, rank) + len(task.stack.params)
            task.inbox[rank] = mine if rank == me else mine.new_empty(size)
        receives += [(rank, flat) for rank, flat in task.inbox.items() if rank != me]
    return wire.exchange(sends, receives, "gradients")


def _held_gradients(stack: Stack) -> Tensor:
    """Return this rank's gradients of a stack, flat, then 1 or 0 per piece for its presence."""
    present, dtype = [float(p.grad is not None) for p in stack.params], _gradient_dtype(stack)
    parts = [
        torch.zeros_like(shards.local(p)) if p.grad is None else shards.local(p.grad)
        for p in stack.params
    ]
    flags = torch.tensor(present)
    return _packed(stack, dist.get_rank(), [part.to(dtype) for part in parts], flags)


def _gradient_dtype(stack: Stack) -> torch.dtype:
    """Return the dtype of sent gradients: that of the parameters, or of their `grad_dtype`."""
    widest = stack.work_dtype
    dtypes = {getattr(p, "grad_dtype", p.dtype) or widest for p in stack.params}  # None allows any
    return dtypes.pop() if len(dtypes) == 1 else widest


def _compute(task: Task, settings: Settings) -> None:
    """Compute the direction of a stack as its owner, from the gradients in its inbox."""
    work, stack = task.work, task.stack
    whole = [shards.zeros(p, _gradient_dtype(stack)) for p in stack.params]
    present = torch.zeros(len(whole), device=whole[0].device)
    for rank, flat in task.inbox.items():
        boxes = zip(whole, _boxes(stack, rank), strict=True)
        flags = _unpack_into([target[box] for target, box in boxes], stack, rank, flat)
        present = torch.maximum(present, flags.float())
    direction, stepped = work.engine.advance(work, settings, whole, stack.per_matrix(present > 0))
    direction = direction.to(stack.work_dtype)
    flat = torch.cat([direction.reshape(-1), stepped.to(direction.dtype)])
    task.outcome = flat.to(settings.group["wire_dtype"] or flat.dtype)


def _distribute(tasks: Sequence[Task], group: Mapping[str, Any]) -> list[Callable[[], None]]:
    """Start sending to each rank its shards of the directions; return functions that wait."""
    me = dist.get_rank()
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    waits: list[Callable[[], None]] = []
    for task in tasks:
        stack, layout = task.stack, shards.of(task.stack.params[0])
        if me != task.owner:
            size, dtype = _size(stack, me) + stack.count, group["wire_dtype"]
            device = stack.params[0].device
            task.outcome = torch.empty(size, dtype=dtype or stack.work_dtype, device=device)
        if layout is None:
            waits.append(wire.broadcast(task.outcome, task.owner, "directions"))
        elif me != task.owner:
            receives.append((task.owner, task.outcome))
        else:
            direction, stepped = _split(task)
            whole = stack.whole(direction)
            for rank in layout.ranks:
                boxes = zip(whole, _boxes(stack, rank), strict=True)
                flat = _packed(stack, rank, [w[box] for w, box in boxes], stepped)
                if rank == me:
                    task.outcome = flat
                else:
                    sends.append((rank, flat))
    return [*waits, wire.exchange(sends, receives, "directions")]


def _finish(settings: Settings, tasks: Sequence[Task], waits: Sequence[Callable[[], None]]) -> None:
    """Update the weights of a round by the directions, after waiting for them."""
    for wait in waits:
        wait()
    for task in tasks:
        stack, dtype = task.stack, task.stack.work_dtype
        if shards.sharded(stack.params[0]):
            flat = task.outcome.to(dtype)
            parts = [flat.new_zeros(shards.local(p).shape) for p in stack.params]
            stepped = _unpack_into(parts, stack, dist.get_rank(), flat)
            reference.move_boxes(task.work, settings, parts, stepped)
        else:
            direction, stepped = _split(task)
            reference.move(task.work, settings, direction.to(dtype), stepped)
        task.outcome = task.outcome.new_empty(0)


def _split(task: Task) -> tuple[Tensor, Tensor]:
    """Split a flat outcome into directions (b, m, n) and the mask of stepped matrices (b,)."""
    flat, count = task.outcome, task.stack.count
    return flat[:-count].view(count, *sorted(task.stack.shape)), flat[-count:]


def _boxes(stack: Stack, rank: int) -> list[Box]:
    """Return the box of each piece's parameter on a rank; all of a plain tensor."""
    layouts = [(param, shards.of(param)) for param in stack.params]
    return [h.boxes[h.ranks.index(rank)] if h else shards.box(p) for p, h in layouts]


def _size(stack: Stack, rank: int) -> int:
    """Return the number of entries of a stack on a rank, without other sections."""
    boxes = zip(stack.pieces, _boxes(stack, rank), strict=True)
    return sum(math.prod(_shape(piece, box)) for piece, box in boxes)


def _shape(piece: Piece, box: Box) -> list[int]:
    sizes = [s.stop - s.start for s in box]
    if piece.block.section is not None:
        axis, lines = _lines(piece, box)
        sizes[axis] = len(lines)
    return sizes


def _lines(piece: Piece, box: Box) -> tuple[int, Tensor]:
    extents = tuple((s.start, s.stop) for s in box)
    return axes.lines(piece.block, extents, piece.param.device)


def _packed(stack: Stack, rank: int, parts: Sequence[Tensor], flags: Tensor) -> Tensor:
    """Return the sections of a stack in a rank's shards of its parameters, flat, then the flags."""
    flat: list[Tensor] = []
    for piece, box, part in zip(stack.pieces, _boxes(stack, rank), parts, strict=True):
        whole = piece.block.section is None
        flat.append((part if whole else part.index_select(*_lines(piece, box))).reshape(-1))
    return torch.cat([*flat, flags.to(flat[0])])


def _unpack_into(parts: Sequence[Tensor], stack: Stack, rank: int, flat: Tensor) -> Tensor:
    """Write the result of `_packed` into a rank's shards, and return the flags."""
    for piece, box, part in zip(stack.pieces, _boxes(stack, rank), parts, strict=True):
        shape = _shape(piece, box)
        section, flat = flat.tensor_split([math.prod(shape)])
        if piece.block.section is None:
            part.copy_(section.view(shape))
        else:
            part.index_copy_(*_lines(piece, box), section.view(shape).to(part.dtype))
    return flat
