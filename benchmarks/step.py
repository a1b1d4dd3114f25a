"""Time one whole optimizer step: our Muon, Leon and Pion beside torch's Muon and AdamW, and peers.

    python benchmarks/step.py                                    # 2 layers of width 768, CPU
    python benchmarks/step.py --device cuda --set gpt2-small --set llama-1b --json step.json
    python benchmarks/step.py --device cuda --directions --peer dion=PATH  # bare directions
    python benchmarks/step.py --directions --stack 1x64x128 --fall 0       # and max |PPᵀ − I|
    python benchmarks/step_report.py step.json --plot step.png   # tables and a picture of them

The methods move the same weights, each with a state of its own, and take their steps in turn, so
that a change in the machine's load or clock concerns all of them. The time is the median over the
rounds of a step with the device drained before and after; beside it, on CUDA, that of the same step
replayed as a CUDA graph, where the method can be captured, and the memory a step takes above what
is held. The error is that of the last update of one layer, relative in the Frobenius norm, against
the same method in float64 with exact decompositions (AdamW: in float64); the other Muons are held
against the exact polar factor.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nucleon
from nucleon._files import to_json, write_whole
from nucleon.optim.leon import augmented_direction
from nucleon.optim.muon import polar_direction
from nucleon.optim.polar_methods import chosen_method
from nucleon.report.runs import commit, processor
from peers import REPLAYED, Direction, Make, load, version

Shape = tuple[int, int]


def gpt(layers: int, width: int) -> list[Shape]:
    """Return the matrices of a GPT: queries, keys, values; projection; the two of the MLP."""
    d = width
    return [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers


def llama(layers: int, width: int, keys: int, hidden: int) -> list[Shape]:
    """Return the matrices of a Llama: queries and output; keys, values; three of a gated MLP."""
    d = width
    return (
        [(d, d)] * 2 * layers
        + [(keys, d)] * 2 * layers
        + [(hidden, d), (d, hidden)] * layers
        + [(hidden, d)] * layers
    )


def resnet50() -> list[Shape]:
    """Return convolutions flattened to output × input·height·width, and the classifier."""
    shapes: list[Shape] = [(64, 3 * 49)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        shapes.append((4 * width, inputs))  # the shortcut
        for _ in range(blocks):
            shapes += [(width, inputs), (width, 9 * width), (4 * width, width)]
            inputs = 4 * width
    return [*shapes, (1000, 2048)]


SETS = {
    "gpt2-small": gpt(12, 768),
    "gpt2-medium": gpt(24, 1024),
    "gpt2-large": gpt(36, 1280),
    "gpt2-1.5b": gpt(48, 1600),
    "llama-1b": llama(16, 2048, 512, 8192),
    "qwen-0.5b": llama(24, 896, 128, 4864),
    "squares-256": [(256, 256)] * 16,
    "small-16": [(256, n) for n in (256, 512, 768, 1024)] * 4,
    "squares-2048": [(2048, 2048)] * 8,
    "squares-4096": [(4096, 4096)] * 2,
    "resnet-50": resnet50(),
}
DIRECTIONS = [
    (12, 768, 768),
    (12, 768, 3072),
    (24, 1024, 1024),
    (8, 1024, 4096),
    (4, 2048, 2048),
    (4, 2048, 8192),
    (2, 4096, 4096),
    (1, 4096, 11008),
]

PLAIN = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0}
METHODS: dict[str, Make] = {
    "Muon": lambda p: nucleon.Muon(p, **PLAIN),
    "Leon": lambda p: nucleon.Leon(p, **PLAIN),
    "Pion k=1": lambda p: nucleon.Pion(p, **PLAIN),
    "Pion k=4": lambda p: nucleon.Pion(p, samples=4, **PLAIN),
    "torch Muon": lambda p: torch.optim.Muon(p, nesterov=False, **PLAIN),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0, fused=True),
}
ON_A_CPU: dict[str, Make] = {
    "Muon bfloat16": lambda p: nucleon.Muon(p, method="bfloat16", **PLAIN),
    "Leon bfloat16": lambda p: nucleon.Leon(p, method="bfloat16", **PLAIN),
    "Pion k=1 bfloat16": lambda p: nucleon.Pion(p, method="bfloat16", **PLAIN),
}
EXACT: dict[str, Make] = {
    "torch AdamW": METHODS["torch AdamW"],
    "Muon": lambda p: nucleon.Muon(p, method="svd", **PLAIN),
    "Leon": lambda p: nucleon.Leon(p, method="eigh", **PLAIN),
    "Pion k=1": lambda p: nucleon.Pion(p, method="svd", **PLAIN),
    "Pion k=4": lambda p: nucleon.Pion(p, samples=4, method="svd", **PLAIN),
}
"""Reference of each method's error."""
EXACT["torch Muon"] = EXACT["flash-muon"] = EXACT["Muon"]  # they scale alike
EXACT |= {f"{name} bfloat16": EXACT[name] for name in ("Muon", "Leon", "Pion k=1")}


def exact_peer(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return exact polar factors without a scale for the shape, as `peers.OPTIONS` asks for."""
    return nucleon.Muon(params, method="svd", scale="none", **PLAIN)


def shapes_of(name: str) -> list[Shape]:
    """Return a named set, or LAYERSxWIDTH for a GPT of that size."""
    if name in SETS:
        return SETS[name]
    layers, width = map(int, name.split("x"))
    return gpt(layers, width)


def gradients(shapes: Sequence[Shape], device: str, seed: int) -> list[Tensor]:
    """Return Gaussian matrices whose rows fall off as k^(-1/2)."""
    generator = torch.Generator(device).manual_seed(seed)
    fall = [torch.arange(1, m + 1, device=device).rsqrt()[:, None] for m, _ in shapes]
    drawn = (torch.randn(s, generator=generator, device=device) for s in shapes)
    return [g * f for g, f in zip(drawn, fall, strict=True)]


def parameters(shapes: Sequence[Shape], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return zero weights, so that the updates are not rounded to the spacing of larger ones."""
    return [torch.zeros(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def drain(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(steps: dict[str, Callable[[], object]], rounds: int, options: argparse.Namespace):
    """Return the seconds of each call in each round, the calls of a round one after the other.

    In another order every time: one that follows a relative finds its code in the caches.
    """
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in random.Random(number).sample([*steps.items()], len(steps)):
            drain(options.device)
            start = clock()
            step()
            drain(options.device)
            seconds[name].append(clock() - start)
    return seconds


def medians(steps: dict[str, Callable[[], object]], options: argparse.Namespace):
    """Return the median milliseconds of each, after the warm-up."""
    interleaved(steps, options.warmup, options)
    seconds = interleaved(steps, options.rounds, options)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def captured(step: Callable[[], object]) -> Callable[[], object] | None:
    """Return a replay of a warm step as a CUDA graph; None where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except Exception:  # whatever the method does that a graph cannot hold
        torch.cuda.synchronize()
        return None
    return graph.replay


def works(name: str, step: Callable[[], object]) -> bool:
    """Take a first step, in which things are compiled and tuned; say so if it cannot be taken."""
    start = time.perf_counter()
    try:
        step()
        torch.cuda.synchronize()
    except Exception as error:  # of somebody else's code: the others are measured all the same
        print(f"{name} left out: {type(error).__name__}: {str(error).splitlines()[0]}")
        return False
    if (seconds := time.perf_counter() - start) > 1:
        print(f"{name}: {seconds:.0f} s for the first", flush=True)
    return True


def peak_mib(step: Callable[[], object]) -> float:
    """Return the MiB that one step takes above what is held before it."""
    gc.collect()  # or it might be freed meanwhile, and hide what the step takes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_steps(
    shapes: Sequence[Shape], dtype: torch.dtype, makes: dict[str, Make], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Return each method's median milliseconds, eager and as a graph, and its peak memory."""
    device = options.device
    grads = [g.to(dtype) for g in gradients(shapes, device, seed=0)]
    params = parameters(shapes, device, dtype)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    steps: dict[str, Callable[[], object]] = {n: make(params).step for n, make in makes.items()}
    found: dict[str, dict[str, float]] = {}
    if device == "cuda":
        steps = {name: step for name, step in steps.items() if works(name, step)}
        # Before the times: some keep from now on what a step takes, and take no more.
        found["peak_mib"] = {name: peak_mib(step) for name, step in steps.items()}
    found["milliseconds"] = medians(steps, options)
    if device == "cuda":
        replays = {n: captured(step) for n, step in steps.items() if not n.startswith(REPLAYED)}
        kept = {name: replay for name, replay in replays.items() if replay is not None}
        found["graph_milliseconds"] = medians(kept, options)
    return found


def second_update(make: Make, grads: Sequence[Sequence[Tensor]], own: torch.dtype) -> list[Tensor]:
    """Return the second update of weights in the dtype `own`, from the gradients of two steps."""
    first = grads[0]
    params = parameters([(g.shape[0], g.shape[1]) for g in first], first[0].device.type, own)
    optimizer = make(params)
    for drawn in grads:
        for p, g in zip(params, drawn, strict=True):
            p.grad = g.to(own)
            p.detach().zero_()  # so that the weights end as the last update alone
        optimizer.step()
    return [p.detach().double() for p in params]


def errors_of(
    names: Sequence[str],
    makes: dict[str, Make],
    shapes: Sequence[Shape],
    dtype: torch.dtype,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Return the error of the update of the first matrix of each shape, by method.

    Ours take these matrices alone, as the noise of a sample depends on the place of a matrix in the
    optimizer; the others take all, for which they have been compiled.
    """
    firsts = [shapes.index(s) for s in dict.fromkeys(shapes)]
    drawn = [gradients(shapes, options.device, seed) for seed in (1, 2)]
    drawn = [[g.to(dtype) for g in grads] for grads in drawn]
    few = [[grads[i] for i in firsts] for grads in drawn]
    exact = dict[Make, list[Tensor]]()
    found = dict[str, float]()
    for name in names:
        exactly = EXACT.get(name, exact_peer)
        if exactly not in exact:
            exact[exactly] = second_update(exactly, few, torch.float64)
        update = second_update(makes[name], few if name in EXACT else drawn, dtype)
        if name not in EXACT:
            update = [update[i] for i in firsts]
        found[name] = relative_error(update, exact[exactly])
    return found


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    difference = sum((a - b).square().sum() for a, b in zip(found, exact, strict=True))
    return (difference / sum(b.square().sum() for b in exact)).sqrt().item()


def run(
    name: str, shapes: Sequence[Shape], makes: dict[str, Make], options: argparse.Namespace
) -> dict[str, object]:
    dtype, distinct = getattr(torch, options.dtype), list(dict.fromkeys(shapes))
    counts = ", ".join(f"{shapes.count(s)} of {s[0]}×{s[1]}" for s in distinct)
    print(f"\n{name}: {counts}; {options.dtype} weights on {options.device}")
    found = time_steps(shapes, dtype, makes, options)
    times, graphs = found["milliseconds"], found.get("graph_milliseconds", {})
    print(
        f"{'step of':36} {'ms':>9} {'/ AdamW':>8} {'/ torch Muon':>13} "
        f"{'graph ms':>9} {'MiB':>7} "
        f"{'error':>9}"
    )
    errors: dict[str, float] = {}
    if options.error and max(min(s) for s in distinct) <= options.error_rows:
        errors = errors_of(list(times), makes, shapes, dtype, options)
    adamw, torchs = (times.get(name, float("nan")) for name in ("torch AdamW", "torch Muon"))
    for method, value in times.items():
        print(
            f"{method:36} {value:9.3f} {value / adamw:8.1f} "
            f"{value / torchs:13.2f} {graphs.get(method, float('nan')):9.3f} "
            f"{found.get('peak_mib', {}).get(method, float('nan')):7.0f} "
            f"{errors.get(method, float('nan')):9.1e}",
            flush=True,
        )
    return {"set": name, "shapes": shapes, **found, "error": errors}


def exact_direction(total: Tensor, smoothing: Tensor | None) -> Tensor:
    """Return (SSᵀ + Λ)^(-1/2) S in float64 by an eigendecomposition, for Gaussian matrices."""
    wide = total.double()
    gram = wide @ wide.mT + (0.0 if smoothing is None else smoothing.double())
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp_min(1e-14 * values[..., -1:]).rsqrt().unsqueeze(-2)) @ (
        vectors.mT @ wide
    )


def directions(
    shape: tuple[int, int, int], others: dict[str, Direction], options: argparse.Namespace
) -> dict[str, object]:
    """Measure bare directions of one stack: no moments, no weights."""
    count, m, n = shape
    generator = torch.Generator(options.device).manual_seed(0)
    total = torch.randn(shape, generator=generator, device=options.device)
    fall = torch.arange(1, m + 1, device=options.device)[:, None] ** -options.fall
    total *= fall
    # Of other gradients as large: a multiple of SSᵀ would be as near to singular as S itself, and
    # its float32 rounding would decide on the exact direction.
    other = torch.randn(shape, generator=generator, device=options.device)
    other *= fall
    smoothing = other @ other.mT / 2
    group: dict[str, Any] = {"method": "auto", "iterations": 5}
    chosen = chosen_method(group, m, n, total.device, total.dtype)
    half = {**group, "method": "bfloat16"}
    bfloat16: dict[str, Callable[[], Tensor]] = {
        "Muon bfloat16": lambda: polar_direction(total, half),
        "Leon bfloat16": lambda: augmented_direction(total, smoothing, half, 0.95**2),
    }
    calls: dict[str, Callable[[], Tensor]] = {
        "Muon": lambda: polar_direction(total, group),
        "Leon": lambda: augmented_direction(total, smoothing, group, 0.95**2),
        **(bfloat16 if options.device == "cpu" else {}),
        "torch Muon": lambda: torch.stack(
            [
                torch.optim._muon._zeropower_via_newtonschulz(s, (3.4445, -4.7750, 2.0315), 5, 1e-7)
                for s in total
            ]
        ),
        # A copy each: one of them normalizes its argument in place.
        **{name: partial(call, total.clone()) for name, call in others.items()},
    }
    if options.device == "cuda":
        calls = {name: call for name, call in calls.items() if works(name, call)}
    times, errors, norms = medians(calls, options), dict[str, float](), dict[str, float]()
    orthogonality: dict[str, float] = {}
    graphs: dict[str, float] = {}
    if options.device == "cuda":
        replays = {name: captured(call) for name, call in calls.items()}
        graphs = medians({k: v for k, v in replays.items() if v is not None}, options)
    if options.error and m <= options.error_rows:
        exact = {True: exact_direction(total, smoothing), False: exact_direction(total, None)}
        for name, call in calls.items():
            p, against = call().double(), exact[name.startswith("Leon")]
            errors[name] = ((p - against).norm() / against.norm()).item()
            gram = p @ p.mT
            norms[name] = torch.linalg.eigvalsh(gram)[..., -1].max().sqrt().item()
            orthogonality[name] = (gram - torch.eye(m).to(gram)).abs().max().item()
    print(f"\n{count} of {m}×{n}, method {chosen}")
    print(f"{'direction of':36} {'ms':>9} {'graph ms':>9} {'error':>9} {'norm':>7} {'|PPᵀ−I|':>8}")
    for name, value in times.items():
        print(
            f"{name:36} {value:9.3f} {graphs.get(name, float('nan')):9.3f} "
            f"{errors.get(name, float('nan')):9.1e} {norms.get(name, float('nan')):7.4f} "
            f"{orthogonality.get(name, float('nan')):8.4f}",
            flush=True,
        )
    return {
        "stack": shape,
        "method": chosen,
        "milliseconds": times,
        "graph_milliseconds": graphs,
        "error": errors,
        "norm": norms,
        "orthogonality": orthogonality,
    }


def instructions() -> str:
    """Return the instruction set of torch's kernels, the units for bfloat16, and what is set."""
    units = {
        "AVX512_BF16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    present = [name for name, supported in units.items() if supported]
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
    limits = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return " ".join([torch.backends.cpu.get_cpu_capability(), *present, *limits])


def environment(options: argparse.Namespace, peers: dict[str, str]) -> dict[str, object]:
    cuda, source = options.device == "cuda", str(Path(nucleon.__file__).parent)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "nucleon": f"{nucleon.__version__}, {commit() or version('nucleon', source)}",
        "device": torch.cuda.get_device_name() if cuda else processor(),
        **({} if cuda else {"instructions": instructions()}),
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "clock": "CPU time" if options.cpu_time else "wall",
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        **peers,
    }


def triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


def arguments() -> argparse.Namespace:
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
        "--error-rows", type=int, default=1024, help="no errors of larger matrices: an SVD each"
    )
    parser.add_argument(
        "--each-shape", action="store_true", help="then its shapes one by one, without Pion"
    )
    parser.add_argument("--leave-out", action="append", default=[], metavar="METHOD")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PATH]")
    parser.add_argument("--directions", action="store_true", help="bare directions, stack by stack")
    parser.add_argument("--stack", action="append", metavar="KxMxN", help="with --directions")
    parser.add_argument(
        "--fall", type=float, default=0.5, help="rows fall off with this power, with --directions"
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the CPU time of the process, all threads together: for a machine others use",
    )
    parser.add_argument("--json", type=Path, help="write the figures there too, after those of it")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    optimizers, bare, versions = load(options.peer)
    facts = environment(options, versions)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    own = METHODS | (ON_A_CPU if options.device == "cpu" else {})
    makes = {k: v for k, v in {**own, **optimizers}.items() if k not in options.leave_out}
    results: list[dict[str, object]] = []
    if options.json and options.json.exists():
        earlier = json.loads(options.json.read_text())
        if earlier["environment"] != facts:
            raise SystemExit(f"{options.json} is of another machine or setting; name another file")
        results += earlier["results"]

    def keep(result: dict[str, object]) -> None:
        results.append(result)
        if options.json:  # after each, so that a run that is broken off has left the others
            write_whole(options.json, to_json({"environment": facts, "results": results}, indent=1))

    with torch.no_grad():
        stacks = [(k, m, n) for k, m, n in (map(int, s.split("x")) for s in options.stack or ())]
        for shape in (stacks or DIRECTIONS) if options.directions else ():
            keep(directions(shape, bare, options))
    for name in options.set or ([] if options.directions else ["2x768"]):
        shapes = shapes_of(name)
        parts = {name: shapes}
        if options.each_shape:  # after the whole: the others have compiled for them by then
            distinct = dict.fromkeys(shapes)
            parts |= {f"{name} {m}×{n}": [s for s in shapes if s == (m, n)] for m, n in distinct}
        few = {method: make for method, make in makes.items() if not method.startswith("Pion")}
        for label, part in parts.items():
            keep(run(label, part, makes if label == name else few, options))


if __name__ == "__main__":
    main()
