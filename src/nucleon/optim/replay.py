"""The whole step of a stack as one CUDA graph: one launch instead of thirty, without being asked.

A graph holds the addresses it was captured with, so everything that may move or change is read from
two small tensors that stay where they are: a table of addresses, of gradients among others, and the
two rates of the update. What is baked in, the options of `fused.Job`, is compared at every step;
where it changes from step to step, as with a schedule of the momentum, nothing is captured.

The graphs of an optimizer share one pool of memory, which it keeps: that of its largest stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon.optim import fused, weights
from nucleon.optim.situation import Situation
from nucleon.optim.stacks import Stack

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer


@dataclass
class Recording:
    """A stack's step as it was seen last: first run, then captured, then replayed."""

    stack: Stack
    """Kept, so that its id stands for it."""
    key: object
    places: list[int]
    table: Tensor
    """`places` on the device: gradients, totals, skipped, Grams, weights."""
    rates: Tensor
    """(2,): on the direction, and of the decay."""
    known: tuple[float, float] | None = None
    """What the rates hold, where the host knows it."""
    graph: torch.cuda.CUDAGraph | None = None
    fails: bool = False


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
    moments = fused.moment_places(stack, job.layout, states, gradients)
    target = fused.places_in(job.layout, stack.params)
    if moments is None or target is None:
        return False
    rates = weights.rates(stack, at, stack.params[0])
    if any(isinstance(x, Tensor) and x.is_cpu for x in rates):
        return False
    recording = _recording(optimizer, stack, job, [*moments, *target], group)
    _set(recording, rates)
    if recording.graph is not None:
        recording.graph.replay()
    else:
        _run(recording, job, group)
    return True


def _recording(
    optimizer: "MatrixOptimizer", stack: Stack, job: fused.Job, places: list[int], group: Any
) -> Recording:
    """What is known of a stack, with its table brought up to date; captured the second time."""
    known: dict[int, Recording] = optimizer.__dict__.setdefault("_recordings", {})
    device = stack.params[0].device
    key = (job, stack.params[0].dtype, bool(group["weight_decay"]), group["cautious"])
    found = known.get(id(stack))
    if found is None or found.key != key:
        if found is None and len(known) >= 1024:
            known.clear()
        table = fused.table(places, device).clone()
        found = Recording(stack, key, places, table, torch.empty(2, device=device))
        known[id(stack)] = found
        return found
    if found.places != places:
        found.table.copy_(fused.table(places, device))
        found.places = places
    if found.graph is None and not found.fails:
        _capture(optimizer, found, job, group)
    return found


def _set(recording: Recording, rates: tuple[float | Tensor, float | Tensor]) -> None:
    if any(isinstance(rate, Tensor) for rate in rates):
        recording.known = None
        for target, rate in zip(recording.rates, rates, strict=True):
            target.copy_(rate) if isinstance(rate, Tensor) else target.fill_(rate)
    elif recording.known != rates:
        for target, rate in zip(recording.rates, rates, strict=True):
            target.fill_(rate)
        recording.known = (float(rates[0]), float(rates[1]))


def _run(recording: Recording, job: fused.Job, group: Mapping[str, Any]) -> None:
    """Launch the kernels one by one."""
    pieces = len(job.layout.offsets)
    moments, target = recording.table[: 4 * pieces], recording.table[4 * pieces :]
    directions, taken = fused.compute(job, moments, None)
    rate, decay = recording.rates.unbind()
    fused.move(
        recording.stack,
        directions,
        taken,
        rate,
        decay if group["weight_decay"] else 0.0,
        cautious=group["cautious"],
        where=target,
    )


def _capture(
    optimizer: "MatrixOptimizer", recording: Recording, job: fused.Job, group: Mapping[str, Any]
) -> None:
    """Record the launches of a stack that has been run before: they are compiled and tuned.

    Without the synchronization and the emptied cache of `torch.cuda.graph`. Other threads may go on
    using the device: loaders pin memory, and communication is watched.
    """
    store = optimizer.__dict__
    pool = store.setdefault("_graph_pool", torch.cuda.graph_pool_handle())
    stream = store.setdefault("_graph_stream", torch.cuda.Stream(recording.table.device))
    current = torch.cuda.current_stream(recording.table.device)
    stream.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            _run(recording, job, group)
        except RuntimeError:
            recording.fails = True
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    recording.graph = None if recording.fails else graph
