"""All cases of a device, each with its group and its name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

import nucleon
from soundness import cases, skips
from soundness.cases import FULL_STEPS, Setting


@dataclass(frozen=True)
class Case:
    """One of them."""

    group: str
    name: str
    check: Callable[[], object]


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
        shapes = [s.shapes[0], *s.shapes[4:5]]
        check = partial(cases.check_quiet_run, s, steps, cases.small(s), shapes)
        yield Case("quiet", str(s), check)
        for kind in ("steady", "alternating", "mixed"):
            yield Case("scales", f"{kind} {s}", partial(cases.check_scales, s, kind, 4))
    shapes = [(6, 8), (64, 80)] if device == "cpu" else [(6, 8), (128, 256)]
    for make in cases.METHODS:
        for dtype, given in product((torch.float32, torch.bfloat16), ({}, {"momentum": 0.9})):
            s = Setting(make, dtype, device, given)
            check = partial(cases.check_quiet_run, s, 1100, 1.0, shapes)
            yield Case("quiet", f"long {s}", check)
        s = Setting(make, torch.float32, device)
        for momentum in FULL_STEPS:
            check = partial(cases.check_rest, s, momentum)
            yield Case("rest", f"{make.__name__} {momentum}", check)
        for missing in (False, True):
            check = partial(cases.check_expert, s, missing=missing, steps=200)
            yield Case("experts", f"{make.__name__} {'None' if missing else 'zero'}", check)
    for dtype in cases.DTYPES:
        s = Setting(nucleon.Leon, dtype, device)
        yield Case("bound", str(s), partial(cases.check_decay, s))
    for name, s in skips.faults(device):
        yield Case("skips", f"{name}: {s}", partial(skips.check_skip, name, s))
        if skips.of_one_matrix(name):
            yield Case("neighbours", f"{name}: {s}", partial(skips.check_neighbours, name, s))
