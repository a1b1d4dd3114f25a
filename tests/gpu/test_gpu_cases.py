"""On CUDA: the cases of the interpreter, in bfloat16 as well, and the runs of `tests/soundness`."""

import math

import pytest
import torch

pytest.importorskip("triton")

import nucleon
from linalg import kernel_cases
from optim import adamw_cases, step_cases
from soaking import SOAK
from soundness.everything import every_case

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
STACKS = [(64, 200), (64, 200), (200, 72), (96, 96), (3, 64, 80), (130, 1030)]
OPTIONS = {
    "bfloat16 momentum": {"momentum_dtype": BF16},
    "exponential": {"step_length": "exponential", "lr": torch.tensor(0.05, device=CUDA)},
}
STEPS = step_cases.AGREE | {
    f"{cls.__name__} side by side, {name}": (
        step_cases.agree,
        {"cls": cls, "shapes": STACKS, "spoil": 1, "weight_decay": 0.1, **options},
    )
    for cls in (nucleon.Muon, nucleon.Leon, nucleon.Pion)
    for name, options in OPTIONS.items()
}
# 256-wide rows go through the copy engine, 147-wide ones cannot; 130, 200 and 5 leave ragged tiles,
# and a product of 300 rows is stored without the engine, which its operands go through.
SHAPES = [(2, 5, 7), (3, 130, 147), (2, 256, 256), (2, 200, 512), (2, 128, 136), (2, 300, 64)]
CASES = {
    **STEPS,
    **{
        f"{name}, bfloat16": (run, {**options, "dtype": BF16})
        for name, (run, options) in STEPS.items()
        if "dtype" not in options
    },
    **step_cases.OTHERS,
    **{f"AdamW {name}": case for name, case in adamw_cases.CASES.items()},
    **{
        f"AdamW bfloat16 {name} {at}": (adamw_cases.agree, {"dtype": BF16, "at": at, **options})
        for name, options in adamw_cases.OPTIONS.items()
        for at in (0, 1, 4)
    },
    **{
        f"AdamW bfloat16 skips {bad}": (adamw_cases.skips, {"bad": bad, "dtype": BF16})
        for bad in (math.nan, -math.inf)
    },
    **{
        f"{kind} {shape}": (
            kernel_cases.product,
            # Every shape with other tiles; a remainder has large ones.
            {"shape": shape, "kind": kind, "tiles": 0 if kind == "remainder" else number % 4},
        )
        for number, shape in enumerate(SHAPES)
        for kind in kernel_cases.KINDS
    },
    **{
        f"in place {m}": (kernel_cases.grams_in_place, {"m": m, "n": n})
        for m, n in ((136, 64), (201, 75))
    },
    "elementwise": kernel_cases.CASES["elementwise"],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_of_the_kernels(case):
    check, options = case
    check(CUDA, **options)


RUNS = [case for case in every_case("cuda") if case.group != "scales"]
SCALES = [case for case in every_case("cuda") if case.group == "scales"]
RUNS += SCALES if SOAK else SCALES[::4]  # of three kinds for each setting, one in turn for most


@pytest.mark.parametrize("case", RUNS, ids=lambda case: f"{case.group}: {case.name}")
def test_a_run_stays_sound(case):
    case.check()
