"""All cases of a device, each with its group and its name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import nucleon
from soundness import cases, skips
from soundness.cases import FULL_STEPS, Setting


@dataclass(frozen=True)
class Case:
    """One of them."""

    group: str
    name: str
    run: Callable[[], object]


FAST = (nucleon.Muon, nucleon.Leon, nucleon.Pion)
"""Optimizers with a fused step."""
HALF = (torch.float16, torch.bfloat16, torch.float32)


def settings_of(device: str) -> list[Setting]:
    """Every option of the fused step, and one of each other method and dtype."""
    fused = [
        s
        for s in cases.settings(device, dtypes=HALF)
        if s.make in FAST and s.options["method"] == "auto"
    ]
    others = [s for s in cases.some_settings(device) if str(s) not in set(map(str, fused))]
    return [*fused, *others]


def every_case(device: str, steps: int = 80) -> Iterator[Case]:
    """The list of `tests/soundness` for this device, without the runs of hypothesis."""
    for s in settings_of(device):
        yield Case(
            "quiet",
            str(s),
            lambda s=s: cases.quiet_run(s, steps, cases.small(s), [s.shapes[0], *s.shapes[4:5]]),
        )
        for kind in ("steady", "alternating", "mixed"):
            yield Case("scales", f"{kind} {s}", lambda s=s, kind=kind: cases.scale_run(s, kind, 4))
    for make in cases.METHODS:
        for dtype in (torch.float32, torch.bfloat16):
            for given in ({}, {"momentum": 0.9}):
                s = Setting(make, dtype, device, given)
                shapes = [(6, 8), (64, 80)] if device == "cpu" else [(6, 8), (128, 256)]
                run = lambda s=s, shapes=shapes: cases.quiet_run(s, 1100, 1.0, shapes)  # noqa: E731
                yield Case("quiet", f"long {s}", run)
        for momentum in FULL_STEPS:
            rest = Setting(make, torch.float32, device)
            run = lambda s=rest, momentum=momentum: cases.comes_to_rest(s, momentum)  # noqa: E731
            yield Case("rest", f"{make.__name__} {momentum}", run)
        for missing in (False, True):
            run = lambda make=make, missing=missing: cases.expert_rests(  # noqa: E731
                Setting(make, torch.float32, device), missing=missing, steps=200
            )
            yield Case("experts", f"{make.__name__} {'None' if missing else 'zero'}", run)
    for dtype in cases.DTYPES:
        bound = Setting(nucleon.Leon, dtype, device)
        yield Case("bound", str(bound), lambda s=bound: cases.bound_decays(s))
    for name, s in skips.faults(device):
        label = f"{name}: {s}"
        run = lambda name=name, s=s: skips.skip_keeps_the_bits(name, s)  # noqa: E731
        yield Case("skips", label, run)
        if skips.of_one_matrix(name):
            run = lambda name=name, s=s: skips.neighbours_step_as_ever(name, s)  # noqa: E731
            yield Case("neighbours", label, run)


def fused_step(s: Setting) -> bool:
    """Return True if a setting takes the fused step of a CUDA device."""
    chosen = s.options.get("method", "auto") in ("auto", "half")
    return s.device != "cpu" and s.make in FAST and s.dtype != torch.float64 and chosen
