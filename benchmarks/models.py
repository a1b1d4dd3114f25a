"""Time the whole optimizer step of a real model by `for_model`, beside what else can step it.

    python benchmarks/models.py gpt2 --device cuda --json gpt2.json
    python benchmarks/models.py llama-1b --device cuda --peer dion=PATH    # and other people's Muon
    python benchmarks/models.py resnet50 --device cuda --channels-last
    python benchmarks/models.py small-gpt                                  # on a CPU
    python benchmarks/models.py small-gpt --average 0.1                    # what the average costs
    python benchmarks/models.py moe --tiny                                 # anywhere

The model has random weights and the gradients of one backward pass. `for_model` steps the model's
own parameters. The yardsticks step the same matrices, cut out of the model by the axes of
`explain()` as contiguous 2-D tensors, with torch's fused AdamW for the rest. All methods move the
same weights, each with a state of its own, in turn and in another order every round. On a CPU
Leon and Muon are measured with method="bfloat16" too. With `--average` only Leon and Muon step,
each with and without the average of the iterates. On a CPU with one thread the clock is that of the
processor.

    ms         median over the rounds, the least and the most, from an idle device to an idle one
    /          as multiples of AdamW alone, and of torch's Muon with AdamW
    share      of a training step: step / (forward + backward + step), of the stated batch
    launches   of kernels and graphs by the host; kernels and their time: those on the device
    MiB        memory that the first three steps take above weights, gradients and state; what an
               earlier step of another instance has compiled and tuned is not among them
"""

import argparse
import gc
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import nucleon
from networks import KINDS, Network, build
from nucleon._files import to_json, write_whole
from nucleon.optim.matrices.parameters import blocks
from peers import Make, load
from step import METHODS, drain, environment, works

WARM = 3
"""Steps before a step is as all later ones: it is compiled, then captured, then replayed."""
LEON, MUON, SAME = "Leon.for_model", "Muon.for_model", "Leon of the same blocks"
ADAMW = "torch AdamW"
BESIDE = " + fused AdamW"
AVERAGE = " with an average"
REQUIRED = {"same blocks": 1.15, "fastest other Muon": 1.0, AVERAGE: 1.1}
_LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")

Step = Callable[[], object]
Figures = dict[str, float]


@dataclass(frozen=True)
class Parts:
    """The parameters of a model as `for_model` divides them, all with gradients."""

    matrices: list[Tensor]
    """Copies: contiguous, 2-D, each with its gradient likewise."""
    rest: list[Tensor]
    """Parameters of the model."""
    axes: Counter[str]
    """Number of parameters that each spec reads as matrices."""


def divided(optimizer: nucleon.Leon) -> Parts:
    """Return the matrices of an optimizer as copies, and the parameters it leaves to AdamW."""
    routes = {row.name: row for row in optimizer.explain()}
    parts = Parts([], [], Counter())
    for param, info in optimizer.infos.items():
        if param.grad is None:
            continue
        if routes[info.name].route != "matrix":
            parts.rest.append(param)
            continue
        parts.axes[info.axes or "r c"] += 1
        for block in blocks(param, info.axes):
            pairs = zip(block.matrices(param.detach()), block.matrices(param.grad), strict=True)
            for pair in pairs:
                weight, gradient = (x.clone(memory_format=torch.contiguous_format) for x in pair)
                weight.requires_grad_().grad = gradient
                parts.matrices.append(weight)
    return parts


def sides(
    model: nn.Module, parts: Parts, peers: dict[str, Make], average: float | None
) -> dict[str, Callable[[], list[Optimizer]]]:
    """Return functions that make the optimizers of one whole step, by method."""

    def adamw(params: Iterable[Tensor]) -> list[Optimizer]:
        given = list(params)
        return [torch.optim.AdamW(given, lr=3e-4, fused=True)] if given else []

    def beside(make: Make) -> Callable[[], list[Optimizer]]:
        return lambda: [make(parts.matrices), *adamw(parts.rest)]

    on_a_cpu: dict[str, Callable[[], list[Optimizer]]] = {
        "Leon.for_model, bfloat16": lambda: [nucleon.Leon.for_model(model, method="bfloat16")],
        "Muon.for_model, bfloat16": lambda: [nucleon.Muon.for_model(model, method="bfloat16")],
    }
    if average is not None:
        kinds = {LEON: nucleon.Leon, MUON: nucleon.Muon}
        plain = {name: partial(_alone, kind, model) for name, kind in kinds.items()}
        beside_it = {
            name + AVERAGE: partial(_alone, kind, model, average=average)
            for name, kind in kinds.items()
        }
        return plain | beside_it
    others = {"torch Muon": METHODS["torch Muon"], **peers}
    return {
        LEON: lambda: [nucleon.Leon.for_model(model)],
        MUON: lambda: [nucleon.Muon.for_model(model)],
        **(on_a_cpu if next(model.parameters()).device.type == "cpu" else {}),
        SAME + BESIDE: beside(nucleon.Leon),
        **{name + BESIDE: beside(make) for name, make in others.items()},
        ADAMW: lambda: adamw(p for p in model.parameters() if p.grad is not None),
    }


def _alone(
    kind: type[nucleon.Leon | nucleon.Muon], model: nn.Module, **options: Any
) -> list[Optimizer]:
    return [kind.for_model(model, **options)]


def step_of(optimizers: Sequence[Optimizer]) -> Step:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


# ------------------------------------------------------------------ time


def _clock() -> Callable[[], float]:
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def milliseconds(call: Step, device: str) -> float:
    """Return the milliseconds of a call, from an idle device to an idle device."""
    if device != "cuda":
        clock = _clock()
        start = clock()
        call()
        return 1e3 * (clock() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def passes(network: Network, options: argparse.Namespace) -> float:
    """Return the milliseconds of forward and backward; the gradients of the last one stay."""
    half = options.device == "cuda" and options.dtype == "float32"

    def once() -> None:
        network.model.zero_grad(set_to_none=True)
        with torch.autocast(options.device, torch.bfloat16, enabled=half):
            loss = network.loss()
        loss.backward()

    rounds = 1 if options.tiny else 5
    times = [milliseconds(once, options.device) for _ in range(2 + rounds)]
    for name, p in network.model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            raise SystemExit(f"the gradient of {name} is not finite")
    return statistics.median(times[2:])


def interleaved(
    steps: dict[str, Step], params: Sequence[Tensor], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the milliseconds of each step in each round, in another order every time."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM + options.rounds):
        if options.move_gradients:
            move_gradients(params)
        for name, step in random.Random(number).sample([*steps.items()], len(steps)):
            found[name].append(milliseconds(step, options.device))
    return {name: times[WARM:] for name, times in found.items()}


def move_gradients(params: Sequence[Tensor]) -> None:
    """Give all gradients new addresses, as a backward pass after `zero_grad` may."""
    held = [p.grad for p in params]  # until all are copied: none gets the place of another
    for p, gradient in zip(params, held, strict=True):
        p.grad = None if gradient is None else gradient.clone()


# ------------------------------------------------------------------ memory and launches


def with_memory(make: Callable[[], list[Optimizer]]) -> tuple[list[Optimizer], float]:
    """Return warm optimizers, and the MiB that their first steps took above their state."""
    gc.collect()  # or something might be freed meanwhile, and hide what a step takes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizers = make()
    for _ in range(WARM):
        step_of(optimizers)()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before - sum(map(state_bytes, optimizers))
    return optimizers, taken / 2**20


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes that an optimizer keeps on the device for its parameters."""
    tensors = (x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, Tensor) and x.is_cuda)
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )


def launched(step: Step) -> Figures:
    """Return the host's launches in one warm step, the device's kernels and their milliseconds."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    host = [e for e in profiler.events() if e.device_type == DeviceType.CPU]
    on_device = [
        e
        for e in profiler.events()
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]
    return {
        "launches": sum(_LAUNCH.match(e.name) is not None for e in host),
        "kernels": len(on_device),
        "kernel_milliseconds": sum(e.time_range.elapsed_us() for e in on_device) / 1e3,
    }


# ------------------------------------------------------------------ one model


def measure(
    network: Network, peers: dict[str, Make], options: argparse.Namespace
) -> dict[str, Any]:
    """Return all figures of one model, and print them on the way."""
    backward = passes(network, options)
    parts = divided(nucleon.Leon.for_model(network.model))
    result = facts(network, parts, backward)
    describe(result, options)
    figures: dict[str, Figures] = {}
    steps: dict[str, Step] = {}
    for name, make in sides(network.model, parts, peers, options.average).items():
        figures[name] = {}
        if options.device == "cuda":
            # Compiles and tunes, which takes memory of its own; another instance is measured.
            if not works(name, step_of(make())) and name.removesuffix(BESIDE) in peers:
                continue
            optimizers, figures[name]["mib"] = with_memory(make)
            steps[name] = step_of(optimizers)
            figures[name] |= launched(steps[name])
        else:
            steps[name] = step_of(make())
    params = [*network.model.parameters(), *parts.matrices]
    for name, times in interleaved(steps, params, options).items():
        median = statistics.median(times)
        figures[name] |= {"milliseconds": median, "least": min(times), "most": max(times)}
        figures[name]["share"] = median / (backward + median)
    result["methods"] = {name: figures[name] for name in steps}
    times = {name: figures[name]["milliseconds"] for name in steps}
    for name, value in times.items():
        if ADAMW in times:
            figures[name]["of_adamw"] = value / times[ADAMW]
            figures[name]["of_muon"] = value / times["torch Muon" + BESIDE]
    tabulate(result["methods"])
    result["ratios"] = ratios(times)
    if options.device == "cuda" or options.average is not None:
        judge(result["ratios"])
    return result


def facts(network: Network, parts: Parts, backward: float) -> dict[str, Any]:
    """Return the parameters and matrices of a step, and the passes that it is a share of."""
    trained = [p for p in network.model.parameters() if p.grad is not None]
    shapes = Counter(tuple(m.shape) for m in parts.matrices)
    return {
        "parameters": sum(p.numel() for p in network.model.parameters()),
        "trained": sum(p.numel() for p in trained),
        "dtypes": dict(Counter(str(p.dtype) for p in trained)),
        "matrices": [[count, *shape] for shape, count in shapes.items()],
        "axes": dict(parts.axes),
        "rest": {"tensors": len(parts.rest), "entries": sum(p.numel() for p in parts.rest)},
        "batch": network.described,
        "forward_backward_milliseconds": backward,
    }


def describe(result: dict[str, Any], options: argparse.Namespace) -> None:
    stacks = ", ".join(f"{count} of {m}×{n}" for count, m, n in result["matrices"])
    rest = result["rest"]
    print(
        f"\n{options.model}: {result['parameters']:,} parameters, {result['trained']:,} trained, "
        f"{options.dtype}\nmatrices: {stacks}\naxes: {result['axes']}\n"
        f"AdamW: {rest['tensors']} tensors, {rest['entries']:,} entries\n"
        f"forward and backward of {result['batch']}: "
        f"{result['forward_backward_milliseconds']:.1f} ms\n",
        flush=True,
    )


def tabulate(methods: dict[str, Figures]) -> None:
    titles = {
        "milliseconds": ("ms", ".3f"),
        "least": ("least", ".3f"),
        "most": ("most", ".3f"),
        "of_adamw": ("/ AdamW", ".1f"),
        "of_muon": ("/ torch's", ".2f"),
        "share": ("share", ".1%"),
        "launches": ("launches", ".0f"),
        "kernels": ("kernels", ".0f"),
        "kernel_milliseconds": ("kernel ms", ".3f"),
        "mib": ("MiB", ".0f"),
    }
    measured = {key for found in methods.values() for key in found}
    titles = {key: title for key, title in titles.items() if key in measured}
    print(f"{'step of':42}" + "".join(f"{title:>11}" for title, _ in titles.values()))
    for name, found in methods.items():
        cells = (f"{found[k]:{style}}" if k in found else "–" for k, (_, style) in titles.items())
        print(f"{name:42}" + "".join(f"{cell:>11}" for cell in cells))


def ratios(times: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Compare Leon's step with its references, or steps with an average with those without."""
    if LEON + AVERAGE in times:
        against = {name + AVERAGE: (name + AVERAGE, name) for name in (LEON, MUON)}
    else:
        muons = [name for name in times if name.endswith(BESIDE) and not name.startswith(SAME)]
        against = {
            "same blocks": (LEON, SAME + BESIDE),
            "fastest other Muon": (LEON, min(muons, key=lambda n: times[n])),
        }
    found: dict[str, dict[str, Any]] = {}
    for which, (step, name) in against.items():
        most = REQUIRED[AVERAGE if AVERAGE in which else which]
        ratio = times[step] / times[name]
        found[which] = {
            "step": step,
            "of": name,
            "ratio": ratio,
            "required": most,
            "met": ratio <= most,
        }
    return found


def judge(ratios: dict[str, dict[str, Any]]) -> None:
    for row in ratios.values():
        verdict = "met" if row["met"] else "missed"
        what = f"{row['step']} / {row['of']}"
        print(f"{what}: {row['ratio']:.3f}, required ≤ {row['required']}: {verdict}")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=KINDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--average", type=float, help="measure what this average costs")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a smoke test")
    parser.add_argument("--channels-last", action="store_true", help="images and their kernels")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each method")
    parser.add_argument(
        "--move-gradients", action="store_true", help="to new addresses before every round"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME[=PATH]")
    parser.add_argument("--leave-out", action="append", default=[], metavar="PEER")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.set_defaults(cpu_time=False)  # of the environment that all benchmarks state
    return parser.parse_args(words)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Build a model, measure it, and write down what was asked for."""
    optimizers, _, versions = load(options.peer) if options.peer else ({}, {}, {})
    peers = {name: make for name, make in optimizers.items() if name not in options.leave_out}
    versions["transformers"] = metadata.version("transformers")
    stated = environment(options, versions)
    stated["clock"] = "CUDA events" if options.device == "cuda" else _clock().__name__
    print(", ".join(f"{key} {value}" for key, value in stated.items()))
    network = build(
        options.model,
        torch.device(options.device),
        tiny=options.tiny,
        dtype=getattr(torch, options.dtype),
        channels_last=options.channels_last,
    )
    result = measure(network, peers, options)
    setting = {"model": options.model, "tiny": options.tiny, "channels_last": options.channels_last}
    result = {**setting, "moved_gradients": options.move_gradients, **result}
    if options.json:
        write_whole(options.json, to_json({"environment": stated, "results": [result]}, indent=1))
    return result


def main() -> None:
    options = arguments()
    result = run(options)
    drain(options.device)
    judged = options.device == "cuda" or options.average is not None
    if judged and not all(r["met"] for r in result["ratios"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
