"""The whole step of a stack as one CUDA graph: one launch instead of thirty, without being asked.

A graph holds the addresses it was captured with, so everything that may move or change is read from
two small tensors that stay where they are: a table of addresses, of gradients among others, and the
two rates of the update. What is baked in, the options of `fused.Job`, is compared at every step;
where it changes from step to step, as with a schedule of the momentum, nothing is captured.

The graphs of an optimizer share pools of memory, which it keeps: one of the largest stack among
them, and a small one for each of the `lanes` of small stacks. Those with large products are not
captured: their kernels take longer than the launches, and between the steps their memory is free
for others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon.optim import addresses, fused, weights
from nucleon.optim.situation import Situation
from nucleon.optim.stacks import Stack

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer


LARGEST = 2**35
"""bm³ of a stack that is captured, b matrices of short side m: 0.1 ms a product on an H200."""


@dataclass
class Recording:
    """A stack's step as it was seen last: first run, then captured, then replayed."""

    stack: Stack
    """Kept, so that its id stands for it."""
    key: object
    places: list[int]
    table: Tensor
    """`places` on the device: gradients, totals, skipped, quiet, Grams, weights."""
    rates: Tensor
    """(2,): on the direction, and of the decay."""
    known: tuple[float | Tensor, float | Tensor] | None = None
    """What the rates hold, where the host knows it."""
    graph: torch.cuda.CUDAGraph | None = None
    fails: bool = False
    seen: list[object] = field(default_factory=list[object])
    """What `_look` saw of states and parameters when they were found regular."""


def update(
    optimizer: "MatrixOptimizer",
    stack: Stack,
    states: Sequence[Mapping[str, Tensor]],
    gradients: Sequence[Tensor],
    at: Situation,
) -> bool:
    """The step of a stack; False, with nothing changed, where `fused` does not serve it."""
    group = at.group
    job = fused.job_of(optimizer, stack, gradients[0], states[0]["total"], group)
    if job is None or group["consistency_every"] or weights.dithered(stack, group):
        return False
    if torch.cuda.is_current_stream_capturing():
        return False
    device = stack.params[0].device
    seen = _look(addresses.tensors_of(stack, states, has_gram=job.has_gram))
    before = _recordings(optimizer).get(id(stack))
    new = addresses.places_in(job.layout, gradients, device)
    if before is not None and before.seen == seen:  # to find them again costs a step its time
        rest = before.places[job.layout.runs :]
    else:
        moments = addresses.of_states(stack, states, has_gram=job.has_gram)
        target = addresses.places_in(job.layout, stack.params, device)
        rest = None if moments is None or target is None else [*moments, *target]
    if new is None or rest is None:
        return False
    rates = weights.rates(stack, at, stack.params[0])
    if any(isinstance(x, Tensor) and x.device != device for x in rates):
        return False
    places = [*new, *rest]
    job = fused.placed(job, places)
    recording = _recording(optimizer, stack, job, places, group)
    recording.seen = seen
    _set(recording, rates)
    if recording.graph is not None:
        recording.graph.replay()
    else:
        _run(recording, job, group)
    return True


def captures(job: fused.Job) -> bool:
    """Whether launches take long beside the kernels."""
    return job.layout.count * min(job.rows, job.columns) ** 3 <= LARGEST


def _look(tensors: Sequence[Tensor]) -> list[object]:
    """All that their addresses depend on; an address says the device as well."""
    looks = Tensor.data_ptr, attrgetter("dtype"), Tensor.is_contiguous
    return [*chain.from_iterable(map(look, tensors) for look in looks)]


def _recordings(optimizer: "MatrixOptimizer") -> dict[int, Recording]:
    """By the id of the stack."""
    return optimizer.__dict__.setdefault("_recordings", {})


def _recording(
    optimizer: "MatrixOptimizer", stack: Stack, job: fused.Job, places: list[int], group: Any
) -> Recording:
    """What is known of a stack, with its table brought up to date; captured the second time."""
    known = _recordings(optimizer)
    device = stack.params[0].device
    key = (job, bool(group["weight_decay"]), group["cautious"])
    found = known.get(id(stack))
    if found is None or found.key != key:
        table = addresses.table(places, device).clone()
        found = Recording(stack, key, places, table, torch.empty(2, device=device))
        known[id(stack)] = found
        return found
    if found.places != places:
        found.table.copy_(addresses.table(places, device))
        found.places = places
    if found.graph is None and not found.fails and captures(job):
        _capture(optimizer, found, job, group)
    return found


def _set(recording: Recording, rates: tuple[float | Tensor, float | Tensor]) -> None:
    known = None if any(isinstance(rate, Tensor) for rate in rates) else rates
    if known is not None and recording.known == known:
        return
    for target, rate in zip(recording.rates, rates, strict=True):
        target.copy_(rate) if isinstance(rate, Tensor) else target.fill_(rate)
    recording.known = known


def _run(recording: Recording, job: fused.Job, group: Mapping[str, Any]) -> None:
    """Launch the kernels one by one."""
    runs = job.layout.runs
    moments, target = recording.table[: 5 * runs], recording.table[5 * runs :]
    directions, taken = fused.compute(job, moments, None)
    rate, decay = recording.rates.unbind()
    fused.move(
        recording.stack,
        directions,
        taken,
        rate,
        decay if group["weight_decay"] else 0.0,
        cautious=group["cautious"],
        where=(target, job.boundaries[-1]),
    )


def _capture(
    optimizer: "MatrixOptimizer", recording: Recording, job: fused.Job, group: Mapping[str, Any]
) -> None:
    """Record the launches of a stack that has been run before: they are compiled and tuned.

    Without the synchronization and the emptied cache of `torch.cuda.graph`. Other threads may go on
    using the device: loaders pin memory, and communication is watched.
    """
    device = recording.table.device
    # A pool dies with the last graph in it, so the first one is kept for as long as the optimizer.
    # Graphs that share a pool must not run at once: one pool for each stream they are replayed on.
    firsts: dict[torch.cuda.Stream, Any] = optimizer.__dict__.setdefault("_first_graphs", {})
    caller = torch.cuda.current_stream(device)
    stream, first = firsts.get(caller) or (torch.cuda.Stream(device), None)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            pool = None if first is None else first.pool()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                _run(recording, job, group)
            finally:
                graph.capture_end()
    except Exception:  # it is launched one by one instead, which shows what is wrong with it
        recording.fails = True
    else:
        recording.graph = graph
        firsts.setdefault(caller, (stream, graph))
