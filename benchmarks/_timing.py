"""Timing shared by the benchmarks: one process, all sides in turn, the median of each."""

import os
import platform
import statistics
import time
from collections.abc import Callable

import torch

from nucleon.report.runs import processor

RESTRICTIONS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")


def instructions() -> str:
    """Return the instruction set of torch's kernels, the units for bfloat16, and what is set."""
    units = {
        "AVX512_BF16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    present = [name for name, supported in units.items() if supported]
    limits = [f"{name}={os.environ[name]}" for name in RESTRICTIONS if name in os.environ]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *present, *limits])


def environment(device: torch.device) -> str:
    """Versions, threads and device: what a figure is worth nothing without."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{processor()}, {instructions()}, {torch.get_num_threads()} threads"
    )
    return f"torch {torch.__version__}, Python {platform.python_version()}, {device}: {name}"


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """One call, from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def medians(
    functions: dict[str, Callable[[], object]], device: torch.device, *, budget: float = 0.5
) -> dict[str, float]:
    """The median time of each function, the functions taking turns so that drift meets them all.

    Each is called once to warm up and then 3 to 15 times, as often as fits into `budget` seconds;
    one that exceeds the budget alone is called once more, one that takes four budgets not again.
    """
    warm = {name: seconds(function, device) for name, function in functions.items()}
    repeats = {
        name: int(t < 4 * budget) if t > budget else max(3, min(15, int(budget / max(t, 1e-6))))
        for name, t in warm.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(max(repeats.values(), default=0)):
        for name, function in functions.items():
            if turn < repeats[name]:
                samples[name].append(seconds(function, device))
    return {name: statistics.median(times or [warm[name]]) for name, times in samples.items()}
