"""What a step sends, computes and keeps on each rank: measured on 1, 2, 4, counted up to 1024.

    python benchmarks/scale.py                                # measured on this CPU, over gloo
    python benchmarks/scale.py --counts llama-8b --dtype bfloat16
    python benchmarks/scale.py --counts llama-70b --link-gbps 400 --tflops 400

The counts are those of the code, product by product and message by message, for the rank that has
most of each; the rest of the update and what DDP and FSDP2 send for themselves come on top. The
method is "polar-express" with five steps, and every product is counted in full, whether or not a
kernel makes use of its symmetry. They become times only with the rates that are given: bytes over
the link plus flops over the rate, nothing overlapped.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import nucleon
from nucleon.optim.engines.ranks import placement, wire
from nucleon.optim.matrices import axes, stacks

Shape = tuple[int, int]
WORK = 4  # bytes of an entry of state and direction, for weights of float32 and of half precision
COUNTER = 8  # bytes of `step`, of `stream`, of `skipped` and of `quiet`
AXES = len(axes.default(2) or "")  # bytes of the text of a matrix's axes


@dataclass(frozen=True)
class Way:
    """A method in a layout under a placement."""

    name: str
    method: str
    sharded: bool
    placement: str
    wire_dtype: torch.dtype | None = None

    @property
    def wire_bytes(self) -> int:
        """Of an entry of a direction on its way."""
        return self.wire_dtype.itemsize if self.wire_dtype else WORK


WAYS = (
    Way("DDP    Leon local", "Leon", False, "local"),
    Way("DDP    Leon owner", "Leon", False, "owner"),
    Way("DDP    Leon owner, bf16 wire", "Leon", False, "owner", torch.bfloat16),
    Way("FSDP2  all-gather Muon (local)", "Muon", True, "local"),
    Way("FSDP2  Muon owner", "Muon", True, "owner"),
    Way("FSDP2  Leon local", "Leon", True, "local"),
    Way("FSDP2  Leon owner", "Leon", True, "owner"),
    Way("FSDP2  Leon owner, bf16 wire", "Leon", True, "owner", torch.bfloat16),
)


def gpt(layers: int, width: int) -> list[Shape]:
    """Four square matrices and the two of the perceptron, as in `nucleon.training.GPT`."""
    return ([(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]) * layers


def llama(layers: int, width: int, keys: int, hidden: int) -> list[Shape]:
    """Queries and output, keys and values, and the three matrices of a gated perceptron."""
    attention = [(width, width)] * 2 + [(keys, width)] * 2
    return (attention + [(hidden, width)] * 2 + [(width, hidden)]) * layers


MODELS = {
    "llama-8b": llama(32, 4096, 1024, 14336),
    "llama-70b": llama(80, 8192, 1024, 28672),
}


# ------------------------------------------------------------------ counted


@dataclass(frozen=True)
class Counts:
    """Of one step, for each rank."""

    sent: list[int]
    """Bytes."""
    flops: list[int]
    state: list[int]
    """Bytes."""


def flops(method: str, m: int, n: int) -> int:
    """Of the direction of an m×n matrix, m ≤ n, and of its Gram: five quintics."""
    return 20 * m**2 * n + 10 * m**3 if method == "Muon" else 6 * m**2 * n + 34 * m**3


def count(way: Way, shapes: Sequence[Shape], ranks: int, entry: int) -> Counts:
    """By formula; the long side must be a multiple of `ranks`, `entry` is bytes of a weight."""
    found = Counts([0] * ranks, [0] * ranks, [0] * ranks)
    if way.placement == "owner" and ranks > 1:
        _count_owners(way, shapes, entry, found)
    else:
        sent = _all_gather(shapes, ranks, entry) if way.sharded else 0
        work = sum(flops(way.method, *sorted(shape)) for shape in shapes)
        state = sum(_state(way, shape) for shape in shapes)
        for rank in range(ranks):
            found.sent[rank], found.flops[rank], found.state[rank] = sent, work, state
    return found


def _count_owners(way: Way, shapes: Sequence[Shape], entry: int, found: Counts) -> None:
    ranks = len(found.sent)
    owners = placement.shares(tuple(((1, r, c),) for r, c in shapes), ranks)
    held = [r * c // ranks + 1 if way.sharded else r * c + 1 for r, c in shapes]  # and a flag
    owned = [sum(h for h, o in zip(held, owners, strict=True) if o == r) for r in range(ranks)]
    for rank in range(ranks):
        mine = [i for i, owner in enumerate(owners) if owner == rank]
        if way.sharded:  # its gradients to their owners, the directions that it owns to the others
            found.sent[rank] = entry * (sum(held) - owned[rank])
            found.sent[rank] += (ranks - 1) * way.wire_bytes * owned[rank]
        else:  # in a ring every direction is passed on, but by the rank before its owner
            found.sent[rank] = way.wire_bytes * (sum(held) - owned[(rank + 1) % ranks])
        found.flops[rank] = sum(flops(way.method, *sorted(shapes[i])) for i in mine)
        others = (2 * COUNTER + AXES) * (len(shapes) - len(mine))
        found.state[rank] = others + sum(_state(way, shapes[i]) for i in mine)


def _all_gather(shapes: Sequence[Shape], ranks: int, entry: int) -> int:
    """Of the gradients, and for each stack an all-reduce of flags: who has one."""
    flags = sum(_all_reduce(4 * size, ranks) for _, size in _stacks(shapes))
    return flags + sum((ranks - 1) * (r * c // ranks) * entry for r, c in shapes)


def _all_reduce(size: int, ranks: int) -> int:
    """What a rank sends in a ring: twice all parts but its own."""
    return 2 * (ranks - 1) * size // ranks


def _state(way: Way, shape: Shape) -> int:
    m, n = sorted(shape)
    return WORK * (m * n + m * m * (way.method == "Leon")) + 4 * COUNTER + AXES


def _stacks(shapes: Sequence[Shape]) -> list[tuple[Shape, int]]:
    """Stacks of one shape, of 2²⁵ entries at most as by default for shards on CUDA; their sizes."""
    params = [(torch.empty(shape, device="meta"), None) for shape in shapes]
    built = stacks.build(params, lambda *_: 2**25)
    return [(stack.shape, len(stack.pieces)) for stack in built]


# ------------------------------------------------------------------ measured


def optimizer_of(
    way: Way, shapes: Sequence[Shape], mesh: DeviceMesh | None, dtype: torch.dtype = torch.float32
) -> Any:
    """An optimizer of weights cut along their long side, with gradients; a mesh for FSDP2."""
    torch.manual_seed(0)

    def spread(x: Tensor) -> Tensor:
        axis = 0 if x.shape[0] > x.shape[1] else 1
        return distribute_tensor(x, mesh, [Shard(axis)]) if mesh is not None else x

    params = [spread(torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = spread(torch.randn(p.shape, dtype=dtype))
    how = {"placement": way.placement, "wire_dtype": way.wire_dtype, "method": "polar-express"}
    return getattr(nucleon, way.method)(params, **how)


def measure(optimizer: Any, rounds: int) -> tuple[float, int, int]:
    """Seconds of a step, bytes that this rank sends in it, bytes of its state."""
    optimizer.step()
    times: list[float] = []
    for _ in range(rounds):
        dist.barrier()
        wire.TRAFFIC.bytes, start = 0, time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    kept = (getattr(v, "_local_tensor", v) for s in optimizer.state.values() for v in s.values())
    return statistics.median(times), wire.TRAFFIC.bytes, sum(v.nbytes for v in kept)


def _rank(rank: int, ranks: int, folder: str, shapes: list[Shape], rounds: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    ways = [optimizer_of(way, shapes, mesh if way.sharded else None) for way in WAYS]
    torch.save([measure(o, rounds) for o in ways], f"{folder}/{ranks}.{rank}.pt")
    dist.destroy_process_group()


def print_measured(shapes: list[Shape], rounds: int) -> None:
    """A table for 1, 2 and 4 ranks: the slowest rank, and the one with most bytes of each."""
    print(f"{len(shapes)} matrices, float32, one thread a rank, torch {torch.__version__}, gloo\n")
    print(f"{'':32}{'ranks':>6}{'ms a step':>11}{'MB sent':>10}{'MB of state':>13}")
    with TemporaryDirectory() as folder:
        tables: dict[int, list[list[tuple[float, int, int]]]] = {}
        for ranks in (1, 2, 4):
            mp.spawn(_rank, (ranks, folder, shapes, rounds), nprocs=ranks)  # pyright: ignore
            tables[ranks] = [torch.load(Path(folder, f"{ranks}.{r}.pt")) for r in range(ranks)]
    for i, way in enumerate(WAYS):
        for ranks, table in tables.items():
            seconds, sent, state = (
                max(column) for column in zip(*(t[i] for t in table), strict=True)
            )
            figures = f"{1e3 * seconds:11.1f}{sent / 1e6:10.2f}{state / 1e6:13.2f}"
            print(f"{way.name:32}{ranks:6}{figures}")


def print_counts(model: str, entry: int, link_gbps: float | None, tflops: float | None) -> None:
    """A table for 8, 64, 256 and 1024 ranks, of the rank with most of each."""
    timed = link_gbps is not None and tflops is not None
    head = f"{'':32}{'ranks':>6}{'GB sent':>10}{'Tflop':>9}{'GB of state':>13}"
    print(f"{model}, {entry} bytes a weight\n")
    print(head + (f"{'s sent':>9}{'s computed':>12}" if timed else ""))
    for way in WAYS:
        for ranks in (8, 64, 256, 1024):
            found = count(way, MODELS[model], ranks, entry)
            sent, work, state = max(found.sent), max(found.flops), max(found.state)
            line = f"{way.name:32}{ranks:6}{sent / 1e9:10.3f}{work / 1e12:9.2f}{state / 1e9:13.3f}"
            if link_gbps is not None and tflops is not None:
                line += f"{8 * sent / link_gbps / 1e9:9.3f}{work / tflops / 1e12:12.3f}"
            print(line)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--counts", choices=MODELS, help="count for a model, measure nothing")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--link-gbps", type=float, help="gigabits a rank sends in a second")
    parser.add_argument("--tflops", type=float, help="10¹² flops that a rank does in a second")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if chosen.counts:
        entry = getattr(torch, chosen.dtype).itemsize
        print_counts(chosen.counts, entry, chosen.link_gbps, chosen.tflops)
    else:
        print_measured(gpt(chosen.layers, chosen.width), chosen.rounds)


if __name__ == "__main__":
    main()
