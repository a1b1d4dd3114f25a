"""The memory of an optimizer: its state, and the peak of what a step needs besides.

    python benchmarks/memory.py                       # 4 layers of width 768, CPU
    python benchmarks/memory.py --device cuda --set gpt2-medium

`largest_stack` bounds the entries of one batched call, and with it the extra memory of a step. On
CUDA the peak is the allocator's; on the CPU it is that of the tensors alive between two operations,
so the workspace inside an operation is not seen.
"""

import argparse
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nucleon
from step import METHODS, PLAIN, SETS, gradients, parameters, shapes_of

STACKS = tuple(2**k for k in (20, 22, 24, 26))
OURS: dict[str, Callable[..., Optimizer]] = {
    "Muon": nucleon.Muon,
    "Leon": nucleon.Leon,
    "Pion k=1": nucleon.Pion,
    "Pion k=4": lambda p, **k: nucleon.Pion(p, samples=4, **k),
}
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages made while it is on, and the peak of those alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and self._key(x) not in known | self.seen:
                self._made(x.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    @staticmethod
    def _key(x: Tensor) -> int:
        return x.untyped_storage()._cdata


def peak_extra(call: Callable[[], object], device: str) -> int:
    """Bytes that `call` holds at its peak, beyond those held before."""
    if device == "cpu":
        with LiveBytes() as live:
            call()
        return live.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def state_bytes(optimizer: Optimizer) -> int:
    values: Iterable[object] = (v for s in optimizer.state.values() for v in s.values())
    return sum(v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor))


def measure(make: Callable[[list[Tensor]], Optimizer], name: str, device: str) -> tuple[int, int]:
    """(bytes of state, peak extra bytes of a second step)."""
    shapes = shapes_of(name)
    params = parameters(shapes, device, torch.float32)
    for p, g in zip(params, gradients(shapes, device, seed=0), strict=True):
        p.grad = g
    optimizer = make(params)
    optimizer.step()  # torch's optimizers make their state here
    return state_bytes(optimizer), peak_extra(optimizer.step, device)


def report(name: str, device: str, stacks: Iterable[int]) -> None:
    shapes = shapes_of(name)
    weights = 4 * sum(m * n for m, n in shapes)
    print(f"\n{name}, float32 on {device}: weights {weights / MIB:.1f} MiB, ", end="")
    print(f"largest matrix {max(4 * m * n for m, n in shapes) / MIB:.1f} MiB")
    print(f"{'':20} {'state':>9}   peak extra of a step, MiB, by largest_stack")
    print(f"{'':20} {'MiB':>9} " + "".join(f"{s:>12,}" for s in stacks))
    for method, make in OURS.items():
        rows = [
            measure(lambda p, make=make, s=s: make(p, largest_stack=s, **PLAIN), name, device)
            for s in stacks
        ]
        extra = "".join(f"{extra / MIB:12.1f}" for _, extra in rows)
        print(f"{method:20} {rows[0][0] / MIB:9.1f} {extra}")
    for method in METHODS:
        if method not in OURS:
            state, extra = measure(METHODS[method], name, device)
            print(f"{method:20} {state / MIB:9.1f} {extra / MIB:12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--set", default="4x768", metavar="NAME", help=f"{', '.join(SETS)}, 4x768")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stack", type=int, action="append", help="a largest_stack to measure")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, nucleon {nucleon.__version__}")
    report(options.set, options.device, options.stack or STACKS)


if __name__ == "__main__":
    main()
