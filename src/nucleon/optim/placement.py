"""Who computes which matrix when several processes train one model.

"local": every rank computes every matrix. Nothing is sent for plain tensors, which DDP keeps alike;
the gradients of DTensors are gathered to every rank.
"owner": each parameter has one rank that keeps its state and computes its direction. Shards of its
gradient are sent there, and the direction is sent back, to each rank what it holds.
"gram": for matrices cut along their long side, see `nucleon.optim.grams`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nucleon import _checks
from nucleon.optim import grams, lanes, options, replay, shards, stacks, weights, wire
from nucleon.optim.shards import Box
from nucleon.optim.situation import Situation
from nucleon.optim.stacks import Stack

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer

T = TypeVar("T")

OPTIONS = ("placement", "wire_dtype", "consistency_every")
"""Options of the run, not of the state: a state is loaded under those of the optimizer at hand."""


def update(optimizer: "MatrixOptimizer", group: dict[str, Any]) -> None:
    """One step of the matrices of a group."""
    if group["placement"] == "owner" and world(group["params"]) != (0,):
        _update_by_owners(optimizer, group)
        return
    pairs = optimizer.stacks_of(group, with_gradient=True)
    if torch.compiler.is_compiling():
        for stack, states in pairs:
            _update_here(optimizer, stack, states, group)
        return
    with lanes.opened() as lane:
        for stack, states in pairs:
            with lane(stack):
                _update_here(optimizer, stack, states, group)


def world(params: Sequence[Tensor]) -> tuple[int, ...]:
    """The ranks that hold these parameters; (0,) in a single process."""
    held = next((shards.of(p) for p in params if shards.sharded(p)), None)
    if held is not None:
        return held.ranks
    if dist.is_available() and dist.is_initialized():
        return tuple(range(dist.get_world_size()))
    return (0,)


def process_groups(params: Sequence[Tensor]) -> wire.Groups:
    """The process groups that reach these ranks, one after the other."""
    held = next((p for p in params if shards.sharded(p)), None)
    return [None] if held is None else shards.mesh_groups(held)


def owners(group: Mapping[str, Any]) -> list[int | None]:
    """The rank that owns each parameter of a group; None where every rank has it for itself."""
    ranks = world(group["params"])
    if group["placement"] != "owner" or group["rule"] != "matrix" or ranks == (0,):
        return [None] * len(group["params"])
    blocks = [stacks.blocks(p, a) for p, a in zip(group["params"], group["axes"], strict=True)]
    sizes = tuple(tuple((b.count, b.rows, b.columns) for b in found) for found in blocks)
    return [ranks[i] for i in shares(sizes, len(ranks))]


@lru_cache(maxsize=64)
def shares(sizes: tuple[tuple[tuple[int, int, int], ...], ...], parts: int) -> tuple[int, ...]:
    """Cut parameters, same shapes together, into `parts` runs of about equal cost m²n + m³.

    Each size has a (count, rows, columns) for every block of the parameter. No run costs more than
    the mean and the dearest parameter together.
    """
    costs = [sum(b * min(r, c) ** 2 * (r + c) for b, r, c in blocks) for blocks in sizes]
    total = sum(costs) or 1
    share, before = [0] * len(sizes), 0
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], sizes[i], i)):
        share[i] = min(parts - 1, (2 * before + costs[i]) * parts // (2 * total))
        before += costs[i]
    return tuple(share)


def of_all_ranks(mine: dict[str, T], groups: Iterable[Mapping[str, Any]]) -> dict[str, T]:
    """Entries that each owner has of its own parameters → all of them, on every rank."""
    spread = any(owner is not None for group in groups for owner in owners(group))
    return wire.merged(mine, "figures of the matrices") if spread else mine


def check(group: Mapping[str, Any], *, gram_form: bool) -> None:
    """Raise on a group whose parameters or options its placement cannot serve."""
    if group["placement"] == "local" or group["rule"] != "matrix":
        return
    for name, param, spec in zip(group["param_names"], group["params"], group["axes"], strict=True):
        shards.supported(name, param)
        if group["placement"] == "gram":
            grams.check(name, param, spec)
    if group["placement"] == "gram" and not gram_form:
        raise ValueError("placement='gram' is for Muon and Leon; use placement='owner'")
    if group["placement"] == "gram" and group["certify"]:
        raise ValueError("placement='gram' keeps no regret; pass certify=False, or 'owner'")
    meshes = {tuple(cast(Any, shards.of(p)).ranks) for p in group["params"] if shards.sharded(p)}
    if any(not shards.sharded(p) for p in group["params"]) and dist.is_initialized():
        meshes.add(tuple(range(dist.get_world_size())))
    if group["placement"] == "owner" and len(meshes) > 1:
        raise ValueError(
            f"the parameters of one group lie on different ranks ({sorted(meshes)}); make one "
            f"group for each mesh"
        )


def _update_here(
    optimizer: "MatrixOptimizer", stack: Stack, states: list[dict[str, Tensor]], group: Any
) -> None:
    first, present = stack.params[0], None
    if shards.sharded(first):
        if group["placement"] == "gram":
            grams.update(optimizer, stack, group)
            return
        there = torch.tensor([float(p.grad is not None) for p in stack.params]).to(first.device)
        wire.add_up(there, shards.mesh_groups(first), "gradients")
        present = _for_each_matrix(stack, there)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in stack.params]
    gradients, at = [*map(wire.gather, found)], Situation(group, stack, states)
    if present is None and replay.update(optimizer, stack, states, gradients, at):
        return
    direction, taken = optimizer.compute(stack, states, gradients, at, present)
    weights.apply(stack, direction, taken, at)
    optimizer.agree(stack, direction, group)


@dataclass
class _Task:
    """A stack on its way: gradients to the owner, the direction back."""

    owner: int
    stack: Stack
    inbox: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """From each rank, flat: its boxes of the gradients, then whether there is one."""
    outcome: Tensor = field(default_factory=lambda: torch.empty(0))
    """Flat: the direction, or the boxes of it that this rank holds; then which are taken."""

    @property
    def matrices(self) -> int:
        """How many there are."""
        return sum(piece.count for piece in self.stack.pieces)


def _update_by_owners(optimizer: "MatrixOptimizer", group: dict[str, Any]) -> None:
    """Rounds of one stack a rank: collect one round ahead, and send while the next is computed."""
    rounds = list(_rounds(group))
    collected = _collect(rounds[0]) if rounds else wire.nothing
    under_way: tuple[list[_Task], Callable[[], None]] = ([], wire.nothing)
    for tasks, following in zip_longest(rounds, rounds[1:], fillvalue=[]):
        collected()
        collected = _collect(following)
        for task in tasks:
            if task.owner == dist.get_rank():
                _compute(optimizer, task, group)
        sent = _distribute(tasks, group)
        _finish(optimizer, *under_way, group)
        under_way = (tasks, sent)
    _finish(optimizer, *under_way, group)


def _rounds(group: Mapping[str, Any]) -> Iterator[list[_Task]]:
    """The i-th stack of every rank, for i = 0, 1, …; the same on all ranks, gradients or not."""
    of_rank: dict[int, list[tuple[Tensor, str | None]]] = defaultdict(list)
    for param, spec, owner in zip(group["params"], group["axes"], owners(group), strict=True):
        of_rank[cast(int, owner)].append((param, spec))
    room = options.room(group)
    built = {rank: stacks.build(of_rank[rank], room, cut=False) for rank in sorted(of_rank)}
    for row in zip_longest(*built.values()):
        yield [_Task(owner, s) for owner, s in zip(built, row, strict=True) if s is not None]


def _collect(tasks: Sequence[_Task]) -> Callable[[], None]:
    """Send what this rank holds of the gradients to their owners; returns how to wait for it."""
    me = dist.get_rank()
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    for task in tasks:
        held = shards.of(task.stack.params[0])
        members = held.replica_of(task.owner) if held else [task.owner]
        if me not in members:
            continue
        mine = _held_gradients(task.stack)
        if me != task.owner:
            sends.append((task.owner, mine))
            continue
        for rank in members:
            size = sum(_sizes(task.stack, rank)) + len(task.stack.params)
            task.inbox[rank] = mine if rank == me else mine.new_empty(size)
        receives += [(rank, flat) for rank, flat in task.inbox.items() if rank != me]
    return wire.exchange(sends, receives, "gradients")


def _held_gradients(stack: Stack) -> Tensor:
    """What this rank holds of the gradients of a stack, flat; then 1 or 0: is it there."""
    there = [float(p.grad is not None) for p in stack.params]
    parts = [
        torch.zeros_like(shards.local(p)) if p.grad is None else shards.local(p.grad)
        for p in stack.params
    ]
    flat = [part.to(_gradient_dtype(stack)).reshape(-1) for part in parts]
    return torch.cat([*flat, torch.tensor(there).to(flat[0])])


def _gradient_dtype(stack: Stack) -> torch.dtype:
    """Of gradients on their way: that of the parameters, unless their `grad_dtype` is another."""
    widest = _checks.work_dtype(stack.params[0].dtype)  # None stands for any
    found = {getattr(p, "grad_dtype", p.dtype) or widest for p in stack.params}
    return found.pop() if len(found) == 1 else widest


def _compute(optimizer: "MatrixOptimizer", task: _Task, group: dict[str, Any]) -> None:
    """As the owner: the direction of a stack from the gradients in its inbox."""
    stack = task.stack
    whole = [shards.zeros(p, _gradient_dtype(stack)) for p in stack.params]
    there = torch.zeros(len(whole), device=whole[0].device)
    for rank, flat in task.inbox.items():
        *parts, flags = flat.split([*_sizes(stack, rank), len(whole)])
        for target, box, part in zip(whole, _boxes(stack, rank), parts, strict=True):
            target[box].copy_(part.view(target[box].shape))
        there = torch.maximum(there, flags.float())
    present = _for_each_matrix(stack, there)
    states = [optimizer.state[p] for p in stack.params]
    at = Situation(group, stack, states)
    direction, taken = optimizer.compute(stack, states, whole, at, present)
    direction = direction.to(_checks.work_dtype(stack.params[0].dtype))
    flat = torch.cat([direction.reshape(-1), taken.to(direction.dtype)])
    task.outcome = flat.to(group["wire_dtype"] or flat.dtype)


def _for_each_matrix(stack: Stack, there: Tensor) -> Tensor:
    """Counts of the gradients of each piece → whether each matrix has one, (b,)."""
    pieces = zip(there.unbind(), stack.pieces, strict=True)
    return torch.cat([count.expand(piece.count) for count, piece in pieces]) > 0


def _distribute(tasks: Sequence[_Task], group: Mapping[str, Any]) -> Callable[[], None]:
    """Send the directions to all ranks, to each what it holds; returns how to wait for them."""
    me = dist.get_rank()
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    waits: list[Callable[[], None]] = []
    for task in tasks:
        stack, held = task.stack, shards.of(task.stack.params[0])
        if held is None:
            entries = task.matrices * math.prod(stack.shape)
            if me != task.owner:
                task.outcome = _buffer(stack, entries + task.matrices, group)
            waits.append(wire.broadcast(task.outcome, task.owner, "directions"))
        elif me != task.owner:
            task.outcome = _buffer(stack, sum(_sizes(stack, me)) + task.matrices, group)
            receives.append((task.owner, task.outcome))
        else:
            direction, taken = _unpack(task)
            whole = stack.whole(direction)
            for rank in held.ranks:
                parts = [w[box] for w, box in zip(whole, _boxes(stack, rank), strict=True)]
                flat = torch.cat([*(part.reshape(-1) for part in parts), taken])
                if rank == me:
                    task.outcome = flat
                else:
                    sends.append((rank, flat))
    waits.append(wire.exchange(sends, receives, "directions"))

    def arrived() -> None:
        for wait in waits:
            wait()

    return arrived


def _finish(
    optimizer: "MatrixOptimizer",
    tasks: Sequence[_Task],
    arrived: Callable[[], None],
    group: dict[str, Any],
) -> None:
    """Move the weights of a round by the directions that have come."""
    arrived()
    for task in tasks:
        stack = task.stack
        at = Situation(group, stack, [optimizer.state[p] for p in stack.params])
        dtype = _checks.work_dtype(stack.params[0].dtype)
        if shards.sharded(stack.params[0]):
            sizes = [*_sizes(stack, dist.get_rank()), task.matrices]
            *flat, taken = task.outcome.to(dtype).split(sizes)
            parts = [x.view(shards.local(p).shape) for x, p in zip(flat, stack.params, strict=True)]
            weights.apply_boxes(stack, parts, taken, at)
            optimizer.agree(stack, taken, group)
        else:
            direction, taken = _unpack(task)
            weights.apply(stack, direction.to(dtype), taken, at)
            optimizer.agree(stack, direction, group)


def _unpack(task: _Task) -> tuple[Tensor, Tensor]:
    """A flat outcome → the directions (b, m, n), and which are taken (b,)."""
    flat, count = task.outcome, task.matrices
    return flat[:-count].view(count, *sorted(task.stack.shape)), flat[-count:]


def _buffer(stack: Stack, size: int, group: Mapping[str, Any]) -> Tensor:
    param = stack.params[0]
    dtype = group["wire_dtype"] or _checks.work_dtype(param.dtype)
    return torch.empty(size, dtype=dtype, device=param.device)


def _boxes(stack: Stack, rank: int) -> list[Box]:
    """What a rank holds of the parameter of each piece; a plain tensor is everywhere whole."""
    held = [shards.of(param) for param in stack.params]
    return [
        h.boxes[h.ranks.index(rank)] if h else tuple(slice(0, n) for n in p.shape)
        for h, p in zip(held, stack.params, strict=True)
    ]


def _sizes(stack: Stack, rank: int) -> list[int]:
    """How many entries of the parameter of each piece a rank holds."""
    return [math.prod(s.stop - s.start for s in box) for box in _boxes(stack, rank)]
