"""The list of work of an optimizer: the stacks, each with the engine that steps it.

It is rebuilt when the `structure` of the optimizer changes. Everything else, such as rates,
momenta, decays and the addresses of gradients, is an input of a step.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from numbers import Real
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from nucleon.optim.engines import adamw, reference
from nucleon.optim.engines.cuda import adamw as cuda_adamw
from nucleon.optim.engines.cuda import engine as cuda
from nucleon.optim.engines.cuda.addresses import layout_of, strides_of
from nucleon.optim.engines.cuda.replay import Lanes
from nucleon.optim.engines.ranks import gathered, owners, placement
from nucleon.optim.engines.ranks.gathered import Gathered
from nucleon.optim.engines.ranks.owners import Owned, Task
from nucleon.optim.engines.work import HasDirection, Matrices, Settings, State, Work
from nucleon.optim.matrices import shards, stacks
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.stacks import Stack
from nucleon.optim.options import RATES


@dataclass
class Worklist:
    """The work of a step, in order."""

    works: list[Work]
    counted: list[list[State]]
    """States of all matrix parameters, by device; a step increments their step counts."""
    sharded: Sequence[Tensor]
    """All DTensors."""
    stateless: Sequence[Tensor]
    """Frozen parameters, which need a state once they may have a gradient."""
    lanes: Lanes


def check_inputs(optimizer: HasDirection) -> None:
    """Check rates and gradients, before anything changes.

    Non-finite gradients raise only with nonfinite="raise"; otherwise engines skip them.
    """
    for group in optimizer.param_groups:
        for rate in RATES:
            value = group[rate]
            if isinstance(value, Tensor):  # it may be on the device
                continue
            if not isinstance(value, Real) or not 0.0 <= float(value) < math.inf:
                raise ValueError(f"{rate} is {value!r} now; set it to a finite number ≥ 0")
        strict = group["nonfinite"] == "raise"
        for param in group["params"]:
            gradient = param.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{optimizer.name} needs dense gradients; {optimizer.infos[param].name} of "
                    f"shape {tuple(param.shape)} has layout {gradient.layout}; pass sparse=False "
                    f"to its module, or use another optimizer for it"
                )
            if strict and gradient is not None and not shards.local(gradient).isfinite().all():
                raise ValueError(
                    f"the gradient of {optimizer.infos[param].name} is not finite; "
                    f"pass nonfinite='skip' to leave it out of such steps"
                )


def structure(optimizer: HasDirection, settings: Sequence[Settings]) -> list[object]:
    """Return the facts on which a list of work depends; every step compares them."""
    # A direction may be assigned at any time, to the instance or to its class.
    facts: list[object] = [optimizer.__dict__.get("direction"), optimizer.__class__.direction]
    for each in settings:
        params: list[Tensor] = each.group["params"]
        facts += each.structure
        facts += map(id, params)
        facts += map(id, map(optimizer.state.get, params))
        facts += map(_FORM, params)
        facts += map(Tensor.stride, params)
    return facts


_FORM = attrgetter("dtype", "device", "shape")


def build(optimizer: HasDirection, settings: Sequence[Settings]) -> Worklist:
    """Return the work of all parameters that have a state, with the engine of each."""
    groups, states = [each.group for each in settings], optimizer.state
    works: list[Work] = []
    for index, group in enumerate(groups):
        params = [param for param in group["params"] if param in states]
        if group["route"] == "adamw":
            if params:
                engine = cuda_adamw if cuda_adamw.serves(params) else adamw
                works.append(Work(engine, index, params, [states[p] for p in params]))
        elif placement.owned(group):
            works.append(_owned(optimizer, index, group))
        else:
            for work in matrices(optimizer, index, group, params):
                gathers = shards.sharded(work.params[0])
                each = Gathered(gathered, index, work.params, work.states, work)
                works.append(each if gathers else work)
    counted: dict[torch.device, list[State]] = defaultdict(list)
    for param in (p for g in groups if g["route"] == "matrix" for p in g["params"]):
        if param in states:
            counted[param.device].append(states[param])
    every = [param for group in groups for param in group["params"]]
    sharded = [param for param in every if shards.sharded(param)]
    stateless = [param for param in every if param not in states]
    fast = [work for work in works if isinstance(work, Matrices) and work.engine is cuda]
    return Worklist(works, [*counted.values()], sharded, stateless, Lanes(fast))


def present(optimizer: HasDirection) -> list[Matrices]:
    """Return all matrices whose state this rank keeps, in stacks, for measurements."""
    works: list[Matrices] = []
    for index, group in enumerate(optimizer.param_groups):
        if group["route"] == "matrix":
            owned = [p for p in group["params"] if "total" in optimizer.state.get(p, {})]
            works += matrices(optimizer, index, group, owned, restride=False)
    return works


def matrices(
    optimizer: HasDirection,
    index: int,
    group: Mapping[str, Any],
    params: Sequence[Tensor],
    *,
    cut: bool = True,
    restride: bool = True,
) -> list[Matrices]:
    """Return the matrices of these parameters in stacks, each with the engine that steps it.

    With `restride` every Ĝ is put into the strides that its engine reads.
    """
    sides: dict[object, object] = {}

    def served(param: Tensor, block: Block) -> object:
        key = (*_FORM(param), strides_of(param), block)
        if key not in sides:
            sides[key] = cuda.sides(optimizer, group, param, block)
        return sides[key]

    def capacity(param: Tensor, block: Block) -> int:
        default = 24 if not param.is_cuda else 27 if served(param, block) is not None else 25
        return group["largest_stack"] or 2**default

    def work(stack: Stack) -> Matrices:
        piece = stack.pieces[0]  # all pieces are of one kind
        fast = served(piece.param, piece.block) is not None and layout_of(stack) is not None
        engine = cuda if fast else reference
        states = [optimizer.state[param] for param in stack.params]
        if fast and restride:
            cuda.restride(stack, states)
        return Matrices(engine, index, stack.params, states, optimizer, stack)

    pairs = [(param, optimizer.infos[param].axes) for param in params]
    return [work(stack) for stack in stacks.build(pairs, capacity, key_of=served, cut=cut)]


def _owned(optimizer: HasDirection, index: int, group: Mapping[str, Any]) -> Owned:
    of_rank: dict[int, list[Tensor]] = defaultdict(list)
    states = optimizer.state
    params = [p for p in group["params"] if p in states]  # frozen ones have none
    for param, owner in zip(group["params"], placement.owners(group, optimizer.infos), strict=True):
        if param in states:
            of_rank[cast(int, owner)].append(param)
    built = {
        rank: matrices(optimizer, index, group, of_rank[rank], cut=False)
        for rank in sorted(of_rank)
    }
    rounds = [
        [Task(owner, work) for owner, work in zip(built, row, strict=True) if work is not None]
        for row in zip_longest(*built.values())
    ]
    return Owned(owners, index, params, [states[p] for p in params], rounds)
