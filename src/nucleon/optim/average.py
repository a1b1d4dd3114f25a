"""The average W̄ of the iterates, usable as the model at any time and without a horizon.

After each step W̄ ← W̄ + σ_t(W − W̄), where t counts the steps and W is a parameter after the step.
The option `average` is the mean age of the iterates in W̄:

    a fraction f in (0, 0.5]   of the run so far: σ_t = (p+1)/(t+p) with p = 1/f − 2; the mean age
                               is f(t−1), and 0.5 is the plain mean
    a number N ≥ 1             of steps: σ_t = (1−γ)/(1−γ^t) with γ = N/(N+1), an exponential
                               average, corrected for its start

A skipped step advances t and averages the unchanged W. The conversion of the theory averages the
iterate before the step instead, see `nucleon.online.o2nc`.

W̄ is float32 for half-precision weights, else of their dtype: 4 bytes per weight, 8 for float64.
Under FSDP2 and tensor parallelism each rank stores its shard; otherwise every rank stores all of W̄.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nucleon import _checks
from nucleon.linalg.kernels import triton_works
from nucleon.optim.engines.cuda.addresses import dense
from nucleon.optim.engines.work import State
from nucleon.optim.groups import warn
from nucleon.optim.matrices import shards

States = Mapping[Tensor, State]
Tensors = tuple[Tensor, ...] | list[Tensor]


def check(average: object, dtype: object = None) -> None:
    """Check `average` and `average_dtype`."""
    if average is not None:
        value = average if isinstance(average, int | float) else math.nan
        if isinstance(value, bool) or not (0 < value <= 0.5 or 1 <= value < math.inf):
            raise ValueError(
                f"average must be None, a fraction of the run in (0, 0.5] or a number of steps "
                f"≥ 1, got {average!r}; it is the mean age of the iterates in the average: "
                f"average=0.1 suits most runs"
            )
    if dtype not in (None, *_checks.FULL_DTYPES):
        raise TypeError(
            f"average_dtype must be None, torch.float32 or torch.float64, got {dtype!r}; half "
            f"precision would lose the small steps of an average"
        )


def share(average: float, t: Tensor) -> Tensor:
    """Return σ_t, the share of the t-th iterate, for a floating-point t ≥ 1."""
    if average < 1:
        p = 1 / average - 2
        return (p + 1) / (t + p)
    return -1 / (average + 1) / torch.expm1(t * -math.log1p(1 / average))


def lerp_(averages: Tensors, weights: Tensors, share: Tensor) -> None:
    """Update W̄ ← W̄ + share·(W − W̄), reading the share on its device."""
    if averages[0].dtype == weights[0].dtype:
        torch._foreach_lerp_(averages, weights, [share] * len(averages))
        return
    for average, weight in zip(averages, weights, strict=True):  # one copy at a time
        average.lerp_(weight.to(average.dtype), share)


def get_multi_avg_fn(average: float) -> Callable[[Tensors, Tensors, Tensor | int], None]:
    """Return a `multi_avg_fn` for `torch.optim.swa_utils.AveragedModel`, with t = num_averaged + 1.

    `AveragedModel` stores its average in the dtype of the weights, and half precision would lose
    the small steps. For such a model average a float32 copy, or use the option `average`.

    Args:
        average: mean age, a fraction f in (0, 0.5] or a number of steps N ≥ 1.
    """
    check(average)

    @torch.no_grad()
    def update(averaged: Tensors, current: Tensors, num_averaged: Tensor | int) -> None:
        dtype = averaged[0].dtype
        if not (dtype.is_floating_point or dtype.is_complex):  # buffers that count
            torch._foreach_copy_(averaged, current)
            return
        t = torch.as_tensor(num_averaged, device=averaged[0].device) + 1
        part = share(average, t.to(_checks.work_dtype(dtype.to_real()))).to(dtype.to_real())
        lerp_([*map(shards.real, averaged)], [*map(shards.real, current)], part)

    return update


@dataclass
class _Pass:
    """Parameters of one dtype on one device, with W̄ of one dtype, which are updated together."""

    average: float
    count: Tensor
    params: list[Tensor] = field(default_factory=list[Tensor])
    averages: list[Tensor] = field(default_factory=list[Tensor])
    addresses: list[int] = field(default_factory=list[int])
    """Addresses of the weights in `table`."""
    table: Tensor | None = None
    """Chunks for the kernel; None if it cannot be used."""

    def run(self) -> None:
        """Average the weights with the share of the count."""
        part = share(self.average, self.count.to(self.averages[0].dtype))
        weights = [*map(shards.real, self.params)]
        if (table := self._table(weights)) is None:
            lerp_(self.averages, weights, part)
            return
        from nucleon.optim.engines.cuda import adamw_kernels

        with torch.cuda.device_of(part):  # Triton launches on the current device
            adamw_kernels.enter_average(table, part, weights[0].dtype)

    def _table(self, weights: list[Tensor]) -> Tensor | None:
        """Return the chunks for the kernel; None for tensors with gaps, or of other dtypes."""
        first = self.averages[0]
        dtypes = (torch.float32, *_checks.HALF_DTYPES)
        serves = first.dtype == torch.float32 and weights[0].dtype in dtypes
        if not (first.is_cuda and serves and triton_works()):
            return None
        addresses = [*map(Tensor.data_ptr, weights)]
        if addresses != self.addresses:
            from nucleon.optim.engines.cuda import adamw_kernels

            pairs = zip(weights, self.averages, strict=True)
            alike = all(w.stride() == a.stride() and dense(w) and w.data_ptr() for w, a in pairs)
            chunks = adamw_kernels.average_table(weights, self.averages).to(first.device)
            self.addresses, self.table = addresses, chunks if alike else None
        return self.table


class Averaging:
    """The average of an optimizer; without effect if average=None.

    The state of each parameter contains `average`, W̄, and `averaged`, the number t of iterates in
    it: 0-d int64, one tensor for all parameters of a device. Before the first step W̄ is zero.
    """

    def __init__(self, average: float | None = None, dtype: torch.dtype | None = None) -> None:
        check(average, dtype)
        self.average, self.dtype = average, dtype
        self._inside = False
        self._known: object = None
        self._counts: list[Tensor] = []
        self._passes: list[_Pass] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the options alone."""
        self.refuse("copying the optimizer")
        return type(self), (self.average, self.dtype)

    def refuse(self, call: str) -> None:
        """Raise inside `averaged()`, where the model is W̄."""
        if self._inside:
            raise RuntimeError(
                f"{call} is not possible inside averaged(), where the parameters are the average; "
                f"leave the block first"
            )

    # ------------------------------------------------------------------ state

    def new_state(self, param: Tensor, states: States) -> State:
        """Return W̄ and t of a parameter: zero, or for a late parameter W and the t of others."""
        if self.average is None:
            return {}
        dtype = self.dtype or _checks.work_dtype(param.dtype)
        dtype = dtype.to_complex() if param.is_complex() else dtype
        average = torch.zeros_like(param, dtype=dtype).detach()
        others = (state["averaged"] for state in states.values() if "averaged" in state)
        count = next(others, torch.zeros((), dtype=torch.int64, device=param.device))
        count = count.to(param.device, copy=True)
        part = shards.local(average)
        part.copy_(torch.where(count > 0, shards.local(param.detach()), part))
        return {"average": average, "averaged": count}

    def restart_missing(self, states: States, saved: Iterable[Mapping[str, Any]]) -> None:
        """Restart the average of loaded states if a saved one has none."""
        if self.average is not None and any(s and "average" not in s for s in saved):
            warn(
                f"the loaded state has no average; average={self.average} starts with the next step"
            )
            self.restart(states)

    def restart(self, states: States) -> None:
        """Restart the average at the next step."""
        self._require()
        self.refuse("restart_average()")
        for state in states.values():
            if "average" in state:
                state["averaged"].zero_()
                shards.local(state["average"]).zero_()

    # ------------------------------------------------------------------ the step

    def update(self, states: States, structure: object) -> None:
        """Average the present weights; `structure` is another object if states have changed."""
        if self.average is None:
            return
        if structure is not self._known:
            self._plan(self.average, states)
            self._known = structure
        for count in self._counts:
            count.add_(1)
        for each in self._passes:
            each.run()

    def _plan(self, average: float, states: States) -> None:
        counts: dict[torch.device, Tensor] = {}
        passes: dict[tuple[torch.device, torch.dtype, torch.dtype], _Pass] = {}
        for param, state in states.items():
            if "average" not in state:
                continue
            values = shards.real(state["average"])
            state["averaged"] = count = counts.setdefault(values.device, state["averaged"])
            key = values.device, values.dtype, param.dtype
            each = passes.setdefault(key, _Pass(average, count))
            if values.numel():  # a shard may be empty
                each.params.append(param)
                each.averages.append(values)
        self._counts = [*counts.values()]
        self._passes = [each for each in passes.values() if each.params]

    # ------------------------------------------------------------------ the average as the model

    @contextmanager
    def swapped(self, states: States, model: nn.Module | None) -> Iterator[None]:
        """Set the parameters to W̄ inside the block, and restore them exactly at its end."""
        self._require()
        self.refuse("averaged()")
        self._inside = True
        with ExitStack() as undo:
            undo.callback(setattr, self, "_inside", False)
            undo.callback(_reshard, model)
            _reshard(model)
            for param, state in self._begun(states).items():
                weight, average = (shards.local(x).detach() for x in (param, state["average"]))
                if weight.dtype == average.dtype:
                    _exchange(weight, average)
                    undo.callback(_exchange, weight, average)
                else:
                    undo.callback(weight.copy_, weight.clone())
                    weight.copy_(average)
            yield

    def state_dict(self, states: States, model: nn.Module) -> dict[str, Any]:
        """Return a copy of `model.state_dict()` with W̄ in place of the parameters."""
        params = model.named_parameters()
        if others := [name for name, p in params if p.requires_grad and p not in states]:
            warn(
                f"{len(others)} trainable parameters, such as {others[0]}, are not in this "
                f"optimizer, so averaged_state_dict has them as they are; with several optimizers "
                f"save the model inside the averaged() of each"
            )
        with self.swapped(states, model):
            values = model.state_dict()
            for name, value in values.items():
                values[name] = value.clone() if isinstance(value, Tensor) else value
            return values

    def _begun(self, states: States) -> dict[Tensor, State]:
        """Return the states with an average; none before the first step, when W̄ is zero; syncs."""
        averages = {param: state for param, state in states.items() if "average" in state}
        begun = any(int(state["averaged"]) for state in [*averages.values()][:1])
        return averages if begun else {}

    def _require(self) -> None:
        if self.average is None:
            raise RuntimeError("this optimizer keeps no average; construct it with average=0.1")


def _exchange(x: Tensor, y: Tensor) -> None:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)


def _reshard(model: nn.Module | None) -> None:
    """Drop the gathered weights that FSDP2 keeps after a forward pass, which are outdated."""
    for module in model.modules() if model is not None else ():
        if hasattr(module, "unshard") and callable(reshard := getattr(module, "reshard", None)):
            reshard()
