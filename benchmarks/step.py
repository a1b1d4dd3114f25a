"""Time one whole optimizer step: our Muon, Leon and Pion beside torch's Muon and AdamW.

    python benchmarks/step.py                                    # 2 layers of width 768, CPU
    python benchmarks/step.py --device cuda --set gpt2-small --set gpt2-medium --json step.json

Every method has its own copy of the weights and takes its steps in turn with the others, so that a
change in the machine's load or clock concerns all of them. The time is the median over the rounds
of a step with the device drained before and after. The error is that of the last update of one
layer, relative in the Frobenius norm, against the same method in float64 with exact
decompositions (AdamW: in float64); torch's Muon is held against the exact polar factor.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Some virtual machines advertise AMX and then fault on it, and torch's Muon works in bfloat16.
# oneDNN reads this once, so it must be set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from torch import Tensor
from torch.optim import Optimizer

import nucleon

Shape = tuple[int, int]
Make = Callable[[Sequence[Tensor]], Optimizer]


def gpt(layers: int, width: int) -> list[Shape]:
    """The matrices of a GPT: queries, keys and values; projection; and the two of the MLP."""
    d = width
    return [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers


SETS = {"gpt2-small": gpt(12, 768), "gpt2-medium": gpt(24, 1024), "gpt2-large": gpt(36, 1280)}

PLAIN = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0}
METHODS: dict[str, Make] = {
    "Muon": lambda p: nucleon.Muon(p, **PLAIN),
    "Leon": lambda p: nucleon.Leon(p, **PLAIN),
    "Pion k=1": lambda p: nucleon.Pion(p, **PLAIN),
    "Pion k=4": lambda p: nucleon.Pion(p, samples=4, **PLAIN),
    "torch Muon": lambda p: torch.optim.Muon(p, nesterov=False, **PLAIN),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0),
    "torch AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0, fused=True),
}
EXACT: dict[str, Make] = {
    **METHODS,
    "Muon": lambda p: nucleon.Muon(p, method="svd", **PLAIN),
    "Leon": lambda p: nucleon.Leon(p, method="eigh", **PLAIN),
    "Pion k=1": lambda p: nucleon.Pion(p, method="svd", **PLAIN),
    "Pion k=4": lambda p: nucleon.Pion(p, samples=4, method="svd", **PLAIN),
    "torch Muon": lambda p: nucleon.Muon(p, method="svd", **PLAIN),
}


def shapes_of(name: str) -> list[Shape]:
    """A named set, or LAYERSxWIDTH for a GPT of that size."""
    if name in SETS:
        return SETS[name]
    layers, width = map(int, name.split("x"))
    return gpt(layers, width)


def gradients(shapes: Sequence[Shape], device: str, seed: int) -> list[Tensor]:
    """Gaussian matrices whose rows fall off as k^(-1/2), the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(m, n, generator=generator) * torch.arange(1, m + 1).rsqrt()[:, None]).to(
            device
        )
        for m, n in shapes
    ]


def parameters(shapes: Sequence[Shape], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Zero weights, so that the updates are not rounded to the spacing of larger ones."""
    return [torch.zeros(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def drain(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(steps: dict[str, Callable[[], object]], rounds: int, options: argparse.Namespace):
    """Seconds of each call in each round, the calls of a round one after the other."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            drain(options.device)
            start = clock()
            step()
            drain(options.device)
            seconds[name].append(clock() - start)
    return seconds


def time_steps(shapes: Sequence[Shape], dtype: torch.dtype, options: argparse.Namespace):
    """Medians of a step in milliseconds, by method."""
    device = options.device
    grads = [g.to(dtype) for g in gradients(shapes, device, seed=0)]
    steps: dict[str, Callable[[], object]] = {}
    for name, make in METHODS.items():
        params = parameters(shapes, device, dtype)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        steps[name] = make(params).step
    interleaved(steps, options.warmup, options)
    seconds = interleaved(steps, options.rounds, options)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def error(name: str, shapes: Sequence[Shape], device: str, dtype: torch.dtype, steps: int = 2):
    """The relative error of the last of a few updates against the exact float64 method."""
    ours, exact = parameters(shapes, device, dtype), parameters(shapes, "cpu", torch.float64)
    pairs = [(METHODS[name](ours), ours), (EXACT[name](exact), exact)]
    updates: list[list[Tensor]] = []
    for optimizer, params in pairs:
        for step in range(steps):
            # Both sides see the same gradients, as the dtype of the weights rounds them.
            for p, g in zip(params, gradients(shapes, "cpu", seed=step), strict=True):
                p.grad = g.to(dtype).to(p)
                p.detach().zero_()  # so that the weights end as the last update alone
            optimizer.step()
        updates.append([p.detach().cpu().double() for p in params])
    difference = sum((a - b).square().sum() for a, b in zip(*updates, strict=True))
    return (difference / sum(b.square().sum() for b in updates[1])).sqrt().item()


def run(name: str, options: argparse.Namespace) -> dict[str, object]:
    shapes, dtype = shapes_of(name), getattr(torch, options.dtype)
    one_layer = list(dict.fromkeys(shapes))
    counts = ", ".join(f"{shapes.count(s)} of {s[0]}×{s[1]}" for s in one_layer)
    print(f"\n{name}: {counts}; {options.dtype} weights on {options.device}")
    times = time_steps(shapes, dtype, options)
    print(f"{'step of':20} {'ms':>9} {'/ Muon':>8} {'/ torch Muon':>13} {'error':>9}")
    errors: dict[str, float] = {}
    for method, value in times.items():
        if options.error:
            errors[method] = error(method, one_layer, options.device, dtype)
        print(
            f"{method:20} {value:9.3f} {value / times['Muon']:8.2f} "
            f"{value / times['torch Muon']:13.2f} {errors.get(method, float('nan')):9.1e}"
        )
    return {"set": name, "shapes": shapes, "milliseconds": times, "error": errors}


def environment(options: argparse.Namespace) -> dict[str, object]:
    cuda = options.device == "cuda"
    return {
        "torch": torch.__version__,
        "nucleon": nucleon.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "clock": "CPU time" if options.cpu_time else "wall",
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--set", action="append", metavar="NAME", help=f"{', '.join(SETS)} or 2x768"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each method")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--error", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the CPU time of the process, all threads together: for a machine others use",
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    facts = environment(options)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if options.device == "cpu":
        limit = os.environ["ONEDNN_MAX_CPU_ISA"]
        print(f"oneDNN is limited to {limit}: with AMX torch's bfloat16 Muon would be faster")
    results = [run(name, options) for name in options.set or ["2x768"]]
    if options.json:
        options.json.write_text(json.dumps({"environment": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
