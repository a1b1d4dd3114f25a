"""The list of work of an optimizer: which stacks there are, and which engine steps each.

It is made when a parameter has its first gradient, and kept. Rates, momenta, decays and addresses
are inputs of a step; another structure, by `signature`, makes a new list: groups that were added, a
state that was loaded, other dtypes, devices, layouts, or options that choose an engine.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from nucleon.optim.engines import adamw, reference
from nucleon.optim.engines.cuda import adamw as cuda_adamw
from nucleon.optim.engines.cuda import engine as cuda
from nucleon.optim.engines.cuda import lanes
from nucleon.optim.engines.cuda.layout import layout_of, strides_of
from nucleon.optim.engines.ranks import gathered, owners, placement
from nucleon.optim.engines.ranks.owners import Owned, Task
from nucleon.optim.engines.work import (
    Computer,
    Engine,
    HasDirection,
    Matrices,
    State,
    Work,
    sums_long,
)
from nucleon.optim.matrices import shards, stacks
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import Infos
from nucleon.optim.matrices.stacks import Stack

Groups = Sequence[dict[str, Any]]
States = Mapping[Tensor, State]


@dataclass
class Worklist:
    """What a step does, in order."""

    works: list[Work]
    signature: list[object]
    counted: dict[torch.device, list[State]]
    """The states of all matrix parameters, which count their steps, by device."""
    sharded: Sequence[Tensor]
    """All DTensors."""
    waiting: Sequence[Tensor]
    """Parameters that have had no gradient so far: the first one makes a new list."""
    summing_long: Set[int]
    """The groups, by identity, of which `sums_long` is true."""

    def derive(self, group: dict[str, Any]) -> None:
        """Derive anew what follows from the options of a group."""
        for work in self.works:
            if work.group is group:
                work.derive()
        if (id(group) in self.summing_long) != sums_long(group):  # another engine steps it then
            self.signature = []


def signature(optimizer: HasDirection, groups: Groups, states: States) -> list[object]:
    """The structure that a list of work was made for: cheap, since every step looks at it."""
    # A hook may be assigned at any time, to the instance or to its class.
    found: list[object] = [optimizer.__dict__.get("direction"), optimizer.__class__.direction]
    for group in groups:
        params: list[Tensor] = group["params"]
        found += [id(group), *map(group.get, optimizer.declared.structure)]
        found += map(id, params)
        found += map(id, map(states.get, params))
        found += map(_LOOK, params)
        found += map(Tensor.stride, params)
    return found


_LOOK = attrgetter("dtype", "device", "shape")


def build(
    optimizer: HasDirection, groups: Groups, states: States, infos: Infos, entered: Set[Tensor]
) -> Worklist:
    """The work of parameters that have had a gradient, here or, for DTensors, on another rank."""
    works: list[Work] = []
    for group in groups:
        chosen = [p for p in group["params"] if p in entered or shards.sharded(p)]
        chosen = [p for p in chosen if p in states]
        if group["route"] == "adamw":
            if chosen:
                engine = cuda_adamw if cuda_adamw.serves(chosen) else adamw
                works.append(Work(engine, group, chosen, [states[p] for p in chosen]))
        elif placement.owned(group):
            works.append(_owned(optimizer, group, states, infos))
        else:
            works += _restrided(matrices(optimizer, group, chosen, states, infos))
    counted: dict[torch.device, list[State]] = defaultdict(list)
    for param in (p for g in groups if g["route"] == "matrix" for p in g["params"]):
        if param in states:
            counted[param.device].append(states[param])
    sharded = [p for g in groups for p in g["params"] if shards.sharded(p)]
    waiting = [p for g in groups for p in g["params"] if p not in entered]
    pools: dict[Any, Any] = {}
    for work in works:
        if isinstance(work, Matrices):
            work.pools = pools
    lanes.assign(works)
    long = {id(group) for group in groups if sums_long(group)}
    return Worklist(
        works, signature(optimizer, groups, states), dict(counted), sharded, waiting, long
    )


def present(
    optimizer: HasDirection, groups: Groups, states: States, infos: Infos
) -> list[Matrices]:
    """All matrices whose state this rank keeps, in stacks; for looking, not for stepping."""
    found: list[Matrices] = []
    for group in (g for g in groups if g["route"] == "matrix"):
        kept = [p for p in group["params"] if "total" in states.get(p, {})]
        found += matrices(optimizer, group, kept, states, infos)
    return found


def matrices(
    optimizer: HasDirection,
    group: dict[str, Any],
    params: Sequence[Tensor],
    states: States,
    infos: Infos,
    *,
    cut: bool = True,
) -> list[Matrices]:
    """Stacks of the matrices of these parameters, each with the engine that steps it."""
    known: dict[object, object] = {}

    def served(param: Tensor, block: Block) -> object:
        key = (*_LOOK(param), strides_of(param), block)
        if key not in known:
            known[key] = cuda.kind(optimizer, group, param, block)
        return known[key]

    def capacity(param: Tensor, block: Block) -> int:
        default = 24 if not param.is_cuda else 27 if served(param, block) is not None else 25
        return group["largest_stack"] or 2**default

    def work(stack: Stack) -> Matrices:
        piece = stack.pieces[0]  # of one kind with the others
        fast = served(piece.param, piece.block) is not None and layout_of(stack) is not None
        computer = cast(Computer, cuda if fast else reference)
        engine: Engine = gathered if shards.sharded(piece.param) else computer
        own = [states[p] for p in stack.params]
        made = Matrices(engine, group, stack.params, own, optimizer, stack, computer)
        made.derive()
        return made

    pairs = [(param, infos[param].axes) for param in params]
    return [work(stack) for stack in stacks.build(pairs, capacity, kind=served, cut=cut)]


def _restrided(works: list[Matrices]) -> list[Matrices]:
    """The same, with every Ĝ in the strides that its engine reads."""
    for work in works:
        if work.computer is cuda:
            cuda.restride(work.stack, work.states)
    return works


def _owned(optimizer: HasDirection, group: dict[str, Any], states: States, infos: Infos) -> Owned:
    """The rounds of a group, see `Owned`."""
    of_rank: dict[int, list[Tensor]] = defaultdict(list)
    params = [p for p in group["params"] if p in states]  # what is frozen has none
    for param, owner in zip(group["params"], placement.owners(group, infos), strict=True):
        if param in states:
            of_rank[cast(int, owner)].append(param)
    built = {
        rank: _restrided(matrices(optimizer, group, of_rank[rank], states, infos, cut=False))
        for rank in sorted(of_rank)
    }
    rounds = [
        [Task(owner, work) for owner, work in zip(built, row, strict=True) if work is not None]
        for row in zip_longest(*built.values())
    ]
    return Owned(owners, group, params, [states[p] for p in params], rounds)
