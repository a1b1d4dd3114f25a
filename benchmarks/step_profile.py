"""Where the time of a step goes: every kernel of the step of one stack, in the order they run.

    python benchmarks/step_profile.py 24x1024x1024 8x2048x2048       # Leon, on CUDA
    python benchmarks/step_profile.py 12x768x3072 --method Muon
    python benchmarks/step_profile.py 2x64x64 --device cpu           # torch's own operators

COUNTxROWSxCOLUMNS is a stack. The step that is profiled is the fourth: the first compiles and
tunes, the second captures a graph unless the products are large. A last line has the sum, which
leaves out what lies between kernels.
"""

import argparse

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from step import METHODS, drain, gradients, parameters


def kernels(stack: str, method: str, device: str) -> list[tuple[str, float]]:
    """Name and microseconds of each, in order."""
    count, rows, columns = map(int, stack.split("x"))
    shapes = [(rows, columns)] * count
    params = parameters(shapes, device, torch.float32)
    for p, g in zip(params, gradients(shapes, device, seed=0), strict=True):
        p.grad = g
    optimizer = METHODS[method](params)
    for _ in range(3):
        optimizer.step()
    drain(device)
    on_cuda = device == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        optimizer.step()
        drain(device)
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [e for e in profiler.events() if e.device_type == kind]
    events.sort(key=lambda e: e.time_range.start)
    # Operators call each other, kernels do not.
    return [
        (e.name, e.time_range.elapsed_us() if on_cuda else e.self_cpu_time_total) for e in events
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stacks", nargs="+", metavar="COUNTxROWSxCOLUMNS")
    parser.add_argument("--method", choices=METHODS, default="Leon")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {name}, float32 weights")
    for stack in options.stacks:
        found = kernels(stack, options.method, options.device)
        print(f"\n{options.method}, {stack}")
        for kernel, microseconds in found:
            print(f"{kernel[:70]:70} {microseconds:9.1f} µs")
        print(f"{f'{len(found)} kernels':70} {sum(t for _, t in found):9.1f} µs", flush=True)


if __name__ == "__main__":
    main()
