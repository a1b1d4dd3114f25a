"""What the conversion costs over the bare optimizer step: time, state and peak memory.

    python benchmarks/o2nc.py                        # one 128×256 matrix, float64, CPU
    python benchmarks/o2nc.py --shape 512x2048 --count 4 --device cuda --dtype float32

Both sides take the same steps with exact decompositions. O2NC also keeps the average and the output
in float64, copies each action, and lets its learner check every gradient; `validate=False` leaves
the checks out. The sides take turns, and the time is the median of a step.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from _timing import environment, medians
from memory import MIB, peak_extra
from nucleon.online.learners import FAML, FTL, FTPL
from nucleon.online.o2nc.optimizer import O2NC
from nucleon.optim import Leon, Muon, Pion

RHO, DISCOUNT, ROUNDS, BOUND = 1.0, 0.99, 10**6, 100.0
PLAIN = {"lr": 1e-3, "momentum": DISCOUNT, "scale": "none", "step_length": "exponential"}
LEARNERS = {"Muon": (FTL, {}), "Pion k=1": (FTPL, {"samples": 1}), "Leon": (FAML, {})}
BARE: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "Muon": lambda p: Muon(p, method="svd", **PLAIN),
    "Pion k=1": lambda p: Pion(p, method="svd", gradient_bound=BOUND, **PLAIN),
    "Leon": lambda p: Leon(p, method="eigh", gradient_bound=BOUND, **PLAIN),
}


def sides(name: str) -> dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]]:
    """The bare optimizer and two ways of running the conversion of its learner."""
    learner, own = LEARNERS[name]
    game = {"rho": RHO, "discount": DISCOUNT, "rounds": ROUNDS, "gradient_bound": BOUND, **own}
    return {
        name: BARE[name],
        f"O2NC({learner.__name__})": lambda p: O2NC(p, learner, **game),
        f"O2NC({learner.__name__}), validate=False": lambda p: O2NC(
            p, learner, validate=False, **game
        ),
    }


def tensors(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors that an optimizer keeps, its learners' included."""
    found = [v for state in optimizer.state.values() for v in state.values()]
    for learner in getattr(optimizer, "learners", ()):
        found += vars(learner).values()
    kept = {v.untyped_storage()._cdata: v.untyped_storage() for v in found if isinstance(v, Tensor)}
    return sum(storage.nbytes() for storage in kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="128x256")
    parser.add_argument("--count", type=int, default=1, help="matrices of that shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    options = parser.parse_args()
    shape = tuple(map(int, options.shape.split("x")))
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    print(environment(device))
    weights = options.count * shape[0] * shape[1] * dtype.itemsize / MIB
    print(f"{options.count} of {options.shape}, {options.dtype}: weights {weights:.2f} MiB\n")
    print(f"{'':32} {'ms':>9} {'/ bare':>8} {'state MiB':>10} {'peak extra MiB':>15}")
    for name in LEARNERS:
        made, steps = {}, {}
        for side, make in sides(name).items():
            params = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(options.count)]
            for i, p in enumerate(params):
                generator = torch.Generator().manual_seed(i)
                p.grad = torch.randn(shape, generator=generator, dtype=dtype).to(device)
            made[side] = make(params)
            steps[side] = made[side].step
        times = medians(steps, device)
        for side, seconds in times.items():
            extra = peak_extra(steps[side], options.device) / MIB
            print(
                f"{side:32} {1e3 * seconds:9.3f} {seconds / times[name]:8.2f} "
                f"{tensors(made[side]) / MIB:10.2f} {extra:15.2f}"
            )


if __name__ == "__main__":
    main()
