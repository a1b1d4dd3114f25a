"""Time the inner AdamW beside torch's fused one, and beside the bytes that it must move.

    python benchmarks/adamw.py                          # all sets, on CUDA
    python benchmarks/adamw.py --set gpt2-small --set "one tensor" --rounds 50
    python benchmarks/adamw.py --device cpu --entries 4096 --rounds 3   # a small one, anywhere

Ours is a group with route="adamw" of an optimizer, stepped by its public `step`. The sides take
turns, each with weights, moments and gradients of its own. `ms` is the median of a step between two
CUDA events that lie around it, the device idle before: what the host takes is part of it. `device`
is that of a step among several that wait in line behind a kernel that sleeps, which hides the host.
`bytes` is the time of moving every gradient twice, to look at it before it is used, and weights and
moments there and back, at the bandwidth of a large copy in the same run; torch's has one flag per
call and moments in the dtype of the weights.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import nucleon
from _timing import environment

Shape = tuple[int, ...]
Step = Callable[[], object]

SLEEP = 40_000_000
"""Clock cycles, some 20 ms: longer than the host takes for all steps that wait."""


def gpt2_vectors(layers: int = 12, width: int = 768) -> list[Shape]:
    """The norms and biases of GPT-2, and its positions: 99 tensors for 12 layers."""
    d = width
    block = [(d,)] * 4 + [(3 * d,), (d,), (4 * d,), (d,)]
    return [*block * layers, (d,), (d,), (1024, d)]


def sets(entries: int) -> dict[str, tuple[list[Shape], torch.dtype]]:
    """Shapes and dtype of the weights of each set; `entries` of the one tensor."""
    small = gpt2_vectors()
    return {
        "gpt2-small": (small, torch.float32),
        "gpt2-small and embedding": ([*small, (50257, 768)], torch.float32),
        "one tensor": ([(entries,)], torch.float32),
        "gpt2-small and embedding, bf16": ([*small, (50257, 768)], torch.bfloat16),
        "one tensor, bf16": ([(entries,)], torch.bfloat16),
    }


def made(shapes: list[Shape], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Weights with gradients."""
    found = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    for p in found:
        p.grad = torch.randn_like(p)
    return found


def event_ms(step: Step, repeats: int) -> float:
    """Milliseconds per step, `repeats` of them queued; on the CPU by the clock."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return 1e3 * (time.perf_counter() - start) / repeats
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if repeats > 1:
        torch.cuda._sleep(SLEEP)
    first.record()
    for _ in range(repeats):
        step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / repeats


def host_ms(step: Step) -> float:
    """Milliseconds until the call returns, the device idle before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def medians(steps: dict[str, Step], rounds: int, measure: Callable[[Step], float]):
    """Of each side; in every round each is measured once."""
    for step in steps.values():
        for _ in range(5):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(measure(step))
    return {name: statistics.median(times) for name, times in found.items()}


def bandwidth(device: str, entries: int, rounds: int) -> float:
    """Bytes per millisecond of a copy, read and written."""
    source = torch.empty(entries, device=device)
    target = torch.empty_like(source)
    times = medians({"copy": lambda: target.copy_(source)}, rounds, lambda s: event_ms(s, 1))
    return 2 * source.nbytes / times["copy"]


def bytes_moved(params: list[Tensor]) -> int:
    """Gradients read twice; weights and float32 moments read and written."""
    return sum(p.numel() * (4 * p.element_size() + 16) for p in params)


def run(name: str, shapes: list[Shape], dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Print one set."""
    ours, theirs = (made(shapes, dtype, options.device) for _ in range(2))
    mine = nucleon.Muon([{"params": ours, "route": "adamw", "lr": 1e-3, "weight_decay": 0.01}])
    fused = torch.optim.AdamW(theirs, lr=1e-3, weight_decay=0.01, fused=True)
    steps: dict[str, Step] = {"nucleon": mine.step, "torch fused": fused.step}
    alone = medians(steps, options.rounds, lambda s: event_ms(s, 1))
    device = medians(steps, options.rounds, lambda s: event_ms(s, options.queue))
    host = medians(steps, options.rounds, host_ms)
    moved = bytes_moved(ours) / bandwidth(options.device, options.entries, options.rounds)
    entries = sum(p.numel() for p in ours)
    kind = str(dtype).removeprefix("torch.")
    print(f"\n{name}: {len(shapes)} tensors, {entries:,} entries, {kind}")
    print(f"{'':14}{'ms':>9}{'device':>9}{'host':>9}")
    for side in steps:
        print(f"{side:14}{alone[side]:9.4f}{device[side]:9.4f}{host[side]:9.4f}")
    print(f"{'bytes':14}{moved:9.4f}{moved:9.4f}")
    for other in ("torch fused", "bytes"):
        parts = [x["nucleon"] / x.get(other, moved) for x in (alone, device)]
        print(f"/ {other:12}{parts[0]:9.3f}{parts[1]:9.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--set", action="append", choices=list(sets(1)), dest="names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--entries", type=int, default=2**27, help="of the one tensor")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--queue", type=int, default=10, help="steps that wait in line")
    options = parser.parse_args()
    print(environment(torch.device(options.device)))
    rate = bandwidth(options.device, options.entries, options.rounds)
    print(f"a copy moves {rate / 1e9:.2f} TB/s")
    for name, (shapes, dtype) in sets(options.entries).items():
        if options.names is None or name in options.names:
            run(name, shapes, dtype, options)


if __name__ == "__main__":
    main()
