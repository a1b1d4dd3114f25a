"""Every place where a number that is not finite can arise, and what a skipped step may change.

A skipped matrix keeps the bits of its weights and moments, and its count of quiet steps; only
`skipped` and `step` go on. No test framework is needed, see `cases`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import nucleon
from soundness.cases import OF_THE_GRAM, Setting
from soundness.watch import KEPT, same_bits, snapshot

Spoil = Callable[[Any, torch.nn.Parameter], None]
"""Makes the next step of a parameter impossible; its gradient is there."""


@dataclass(frozen=True)
class Fault:
    """Fault of a step, with the options that allow it."""

    spoil: Spoil
    options: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)
    needs_gram: bool = False
    only: tuple[type, ...] = (nucleon.Muon, nucleon.Leon, nucleon.Pion)
    weights_alone: bool = False
    """Return True if moments may change in a fused step, which notices the fault too late."""


def _last_matrix(x: torch.Tensor) -> torch.Tensor:
    return x[-1] if x.ndim == 3 else x


def entry(value: float, where: int) -> Spoil:
    """A gradient with this number at this place of its last matrix."""

    def spoil(_, p):
        _last_matrix(p.grad).view(-1)[where] = value

    return spoil


def scaled(size: float) -> Spoil:
    """A gradient of ±size."""

    def spoil(_, p):
        last = _last_matrix(p.grad)
        last.copy_(torch.full_like(last, size).copysign(last))

    return spoil


def times_max(factor: float) -> Spoil:
    """A gradient of ±factor times the largest number of the dtype that a step works in."""

    def spoil(optimizer, p):
        scaled(factor * torch.finfo(optimizer.state[p]["total"].dtype).max)(optimizer, p)

    return spoil


def option(name: str, small: float, large: float) -> Spoil:
    """An option changed on a running optimizer, for float32 and for float64."""

    def spoil(optimizer, p):
        optimizer.param_groups[0][name] = large if p.dtype == torch.float64 else small

    return spoil


def edited(name: str, *where: int, value: float = math.nan) -> Spoil:
    """An entry of the state put there in place, and its mirror in a Gram matrix."""

    def spoil(optimizer, p):
        last = _last_matrix(optimizer.state[p][name])
        last[where] = value
        if name == "gram":
            last[where[::-1]] = value

    return spoil


def twice(size: float) -> Spoil:
    """Ĝ as large as this in the state, and a gradient as large: their sum is not finite."""

    def spoil(optimizer, p):
        total = _last_matrix(optimizer.state[p]["total"])
        largest = size * torch.finfo(total.dtype).max
        total.fill_(largest)
        _last_matrix(p.grad).fill_(largest)

    return spoil


def bounded_and_large(optimizer, p):
    """G²β₁⁻² of half the largest number, and 0.7 of it in M̂: each is held, their sum is not."""
    group, last = optimizer.param_groups[0], _last_matrix(p.grad)
    most = torch.finfo(optimizer.state[p]["gram"].dtype).max
    group["gradient_bound"] = 0.999 * math.sqrt(most / 2) * group["momentum"]
    last.zero_()
    line = last[0] if last.shape[0] <= last.shape[1] else last[:, 0]
    line.fill_(math.sqrt(0.7 * most / len(line)))


HALF, F32, F64 = (torch.float16,), (torch.float32,), (torch.float64,)
MUON, BF16 = (nucleon.Muon,), {"momentum_dtype": torch.bfloat16}
BESIDE = {"needs_gram": True, "weights_alone": True}
FAULTS: dict[str, Fault] = {
    "first entry nan": Fault(entry(math.nan, 0), dtypes=(*Fault.dtypes, *HALF)),
    "last entry inf": Fault(entry(math.inf, -1), dtypes=(*Fault.dtypes, *HALF)),
    "an entry -inf": Fault(entry(-math.inf, 7), dtypes=(*Fault.dtypes, *HALF)),
    "Ĝ overflows": Fault(twice(0.9)),
    "M̂ overflows": Fault(times_max(1e-3), needs_gram=True),
    "Λ overflows by smoothing_scale": Fault(
        option("smoothing_scale", 1e38, 1e307), needs_gram=True
    ),
    "Λ overflows by gradient_bound": Fault(
        bounded_and_large, {"gradient_bound": 1.0}, needs_gram=True
    ),
    "the Nesterov sum overflows": Fault(times_max(0.6), {"nesterov": True}, only=MUON),
    "bf16 cannot hold Ĝ": Fault(scaled(1e39), BF16, dtypes=F64),
    "bf16 rounds Ĝ to inf": Fault(scaled(3.4e38), BF16 | {"momentum": 0.0}, F32, only=MUON),
    "nan in Ĝ": Fault(edited("total", 1, 2)),
    "inf in Ĝ": Fault(edited("total", 0, 0, value=math.inf)),
    "nan on the diagonal of M̂": Fault(edited("gram", 1, 1), needs_gram=True),
    "nan beside the diagonal of M̂": Fault(edited("gram", 0, 2), **BESIDE),
    "inf beside the diagonal of M̂": Fault(edited("gram", 1, 2, value=math.inf), **BESIDE),
}


def faults(device: str) -> Iterator[tuple[str, Setting]]:
    """Each fault with each optimizer and dtype that it can happen to."""
    for name, fault in FAULTS.items():
        for make in fault.only:
            if make is nucleon.Muon and (fault.needs_gram or OF_THE_GRAM & set(fault.options)):
                continue
            for dtype in fault.dtypes:
                yield name, Setting(make, dtype, device, fault.options)


def give_gradients(params, seed: int) -> None:
    """Gaussian ones, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def trained(setting: Setting, shapes, steps: int = 3):
    """An optimizer after some good steps and a quiet one, and its parameters."""
    params = setting.parameters(shapes)
    optimizer = setting.make(params, lr=0.5, weight_decay=0.1, **setting.options)
    for seed in range(steps):
        give_gradients(params, seed)
        optimizer.step()
    for p in params:  # so that a count of quiet steps is there to be kept
        p.grad.zero_()
    optimizer.step()
    return optimizer, params


def check_skip(name: str, setting: Setting) -> None:
    """A spoiled step changes nothing but the counts; a good one afterwards is taken."""
    fault, fused = FAULTS[name], setting.device != "cpu" and setting.dtype != torch.float64
    optimizer, params = trained(setting, setting.shapes[:1])
    give_gradients(params, 100)
    options = dict(optimizer.param_groups[0])
    with torch.no_grad():  # a zero has a sign to be kept
        params[0].view(-1)[:3] = -0.0
        state = optimizer.state[params[0]]
        state["total"].view(-1)[5:7] = -0.0
        if "gram" in state:
            state["gram"].view(-1, *state["gram"].shape[-2:])[:, (0, 3), (3, 0)] = -0.0
    fault.spoil(optimizer, params[0])
    (before,) = snapshot(optimizer, params)
    optimizer.step()
    (after,) = snapshot(optimizer, params)
    kept = [] if fused and fault.weights_alone else [k for k in KEPT if k in before]
    for part in ("weight", *kept):
        assert same_bits(before[part], after[part]), f"{part} changed"
    assert int(after["skipped"]) == int(before["skipped"]) + 1, "not counted"
    assert int(after["step"]) == int(before["step"]) + 1
    assert after["weight"].isfinite().all()
    if not all(before[k].isfinite().all() for k in KEPT if k in before):
        return
    optimizer.param_groups[0].update(options)
    optimizer.state[params[0]]["total"].clamp_(-1, 1)
    give_gradients(params, 101)
    optimizer.step()
    assert params[0].isfinite().all() and not torch.equal(params[0], after["weight"])
    assert int(optimizer.state[params[0]]["skipped"]) == int(after["skipped"])


def check_neighbours(name: str, setting: Setting) -> None:
    """Spoil one matrix of a stack: the others, in it and beside it, step bit for bit."""
    shape = setting.shapes[0]
    shapes = [(3, *shape), shape, shape]
    found = []
    for spoiled in (True, False):
        optimizer, params = trained(setting, shapes)
        give_gradients(params, 100)
        if spoiled:
            FAULTS[name].spoil(optimizer, params[0])
        optimizer.step()
        assert [int(x) for x in optimizer.state[params[0]]["skipped"]] == [0, 0, int(spoiled)]
        assert not any(optimizer.state[p]["skipped"].any() for p in params[1:])
        found.append(snapshot(optimizer, params))
    for a, b in zip(*found, strict=True):
        stack = a["weight"].ndim == 3
        for part in ("weight", *KEPT):
            if part in a:
                ours, theirs = (x[part][:2] if stack else x[part] for x in (a, b))
                assert torch.equal(ours, theirs), f"{part} of a neighbour"


def of_one_matrix(name: str) -> bool:
    """Return True if a fault concerns one matrix; options are those of the whole group."""
    return "overflows by" not in name
