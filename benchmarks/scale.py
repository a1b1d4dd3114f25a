"""What a step sends, computes and keeps on each rank: measured on 1, 2, 4, counted up to 1024.

    python benchmarks/scale.py                                # measured on this CPU, over gloo
    python benchmarks/scale.py --counts llama-8b --dtype bfloat16
    python benchmarks/scale.py --counts llama-70b --link-gbps 400 --tflops 400
    python benchmarks/scale.py --torchtitan                   # under the meshes of torchtitan

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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import nucleon
from nucleon.optim.engines.ranks import placement, wire
from nucleon.optim.matrices import axes, stacks

WORK = 4  # bytes of an entry of state and direction, for weights of float32 and of half precision
COUNTER = 8  # bytes of `step`, and for each matrix of `stream`, of `skipped` and of `quiet`


@dataclass(frozen=True)
class Parameter:
    """A weight, and how its matrices lie in it."""

    rows: int
    columns: int
    axes: str = "r c"

    @property
    def entries(self) -> int:
        """Of all its matrices."""
        return self.rows * self.columns

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of its matrices, (count, rows, columns)."""
        blocks = axes.parse(self.axes, (self.rows, self.columns))
        return tuple((block.count, block.rows, block.columns) for block in blocks)

    @property
    def count(self) -> int:
        """Of matrices."""
        return sum(count for count, _, _ in self.shapes)


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


def gpt(layers: int, width: int) -> list[Parameter]:
    """Four square matrices and the two of the perceptron, as in `gpt.GPT`."""
    wide = [Parameter(4 * width, width), Parameter(width, 4 * width)]
    return ([Parameter(width, width)] * 4 + wide) * layers


def llama(layers: int, width: int, keys: int, hidden: int) -> list[Parameter]:
    """Queries and output, keys and values, and the three matrices of a gated perceptron."""
    attention = [Parameter(width, width)] * 2 + [Parameter(keys, width)] * 2
    return (attention + _perceptron(width, hidden)) * layers


def llama_of_torchtitan(layers: int, width: int, hidden: int, heads: int) -> list[Parameter]:
    """One weight for queries, keys and values of 8 groups of heads, each of 128 rows."""
    queries = heads * 128 // 8
    fused = Parameter(8 * (queries + 2 * 128), width, f"(r r{{{queries},128,128}}) c")
    return [fused, Parameter(width, width), *_perceptron(width, hidden)] * layers


def _perceptron(width: int, hidden: int) -> list[Parameter]:
    return [Parameter(hidden, width)] * 2 + [Parameter(width, hidden)]


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


def count(
    way: Way, params: Sequence[Parameter], ranks: int, entry: int, replicas: int = 1
) -> Counts:
    """By formula, where all shards are alike.

    Args:
        way: the method, its layout and placement.
        params: the weights.
        ranks: how many there are; under "local" of shards, `replicas` is 1.
        entry: bytes of an entry of a gradient.
        replicas: groups of ranks, each of which holds the model.
    """
    found = Counts([0] * ranks, [0] * ranks, [0] * ranks)
    if way.placement == "owner" and ranks > 1:
        _count_owners(way, params, entry, replicas, found)
    else:
        sent = _all_gather(params, ranks, entry) if way.sharded else 0
        work = sum(_flops(way, p) for p in params)
        state = sum(_state(way, p) for p in params)
        for rank in range(ranks):
            found.sent[rank], found.flops[rank], found.state[rank] = sent, work, state
    return found


def _count_owners(
    way: Way, params: Sequence[Parameter], entry: int, replicas: int, found: Counts
) -> None:
    ranks = len(found.sent)
    parts = ranks // replicas if way.sharded else 1
    owners = placement.shares(tuple(p.shapes for p in params), ranks)
    gradients = [p.entries // parts + len(p.shapes) for p in params]  # and a flag for each shape
    directions = [p.entries // parts + p.count for p in params]  # and a flag for each matrix
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for i, owner in enumerate(owners):
        owned[owner].append(i)
    for rank, mine in enumerate(owned):
        if way.sharded:  # its gradients to their owners, the directions that it owns to the others
            first = rank - rank % parts  # of the ranks that hold a model with it
            near = [i for other in range(first, first + parts) for i in owned[other]]
            sent = sum(gradients[i] for i in near) - sum(gradients[i] for i in mine)
            found.sent[rank] = entry * sent
            found.sent[rank] += (ranks - 1) * way.wire_bytes * sum(directions[i] for i in mine)
        else:  # in a ring every direction is passed on, but by the rank before its owner
            following = owned[(rank + 1) % ranks]
            sent = sum(directions) - sum(directions[i] for i in following)
            found.sent[rank] = way.wire_bytes * sent
        found.flops[rank] = sum(_flops(way, params[i]) for i in mine)
        others = sum(_counters(p, 1) for p in params) - sum(_counters(params[i], 1) for i in mine)
        found.state[rank] = others + sum(_state(way, params[i]) for i in mine)


def _all_gather(params: Sequence[Parameter], ranks: int, entry: int) -> int:
    """Of the gradients, once for each shape in them, and for each stack an all-reduce of flags."""
    flags = sum(_all_reduce(4 * size, ranks) for size in _stacks(params))
    entries = sum(len(p.shapes) * (p.entries // ranks) for p in params)
    return flags + (ranks - 1) * entries * entry


def _all_reduce(size: int, ranks: int) -> int:
    """What a rank sends in a ring: twice all parts but its own."""
    return 2 * (ranks - 1) * size // ranks


def _flops(way: Way, param: Parameter) -> int:
    return sum(n * flops(way.method, *sorted(sides)) for n, *sides in param.shapes)


def _state(way: Way, param: Parameter) -> int:
    grams = sum(n * min(sides) ** 2 for n, *sides in param.shapes) if way.method == "Leon" else 0
    return WORK * (param.entries + grams) + _counters(param, 3)


def _counters(param: Parameter, each: int) -> int:
    """Bytes of `step`, of `each` counters per matrix, and of the text of the axes."""
    return COUNTER * (1 + each * param.count) + len(param.axes)


def _stacks(params: Sequence[Parameter]) -> list[int]:
    """Sizes of stacks of one shape, of 2²⁵ entries at most as by default for shards on CUDA."""
    pairs = [(torch.empty(p.rows, p.columns, device="meta"), p.axes) for p in params]
    return [len(stack.pieces) for stack in stacks.build(pairs, lambda *_: 2**25)]


# ------------------------------------------------------------------ under torchtitan


@dataclass(frozen=True)
class Mesh:
    """Degrees of torchtitan's parallelism; of a pipeline each stage has its share of layers."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __str__(self) -> str:
        names = ("HSDP", self.replicate), ("FSDP", self.shard), ("TP", self.tensor)
        found = [f"{name} {n}" for name, n in (*names, ("PP", self.pipeline)) if n > 1]
        return " × ".join(found)


RUNS = {
    "Llama 8B": (
        llama_of_torchtitan(32, 4096, 14336, heads=32),
        8.03e9,
        (Mesh(shard=64), Mesh(shard=1024), Mesh(replicate=16, shard=64)),
    ),
    "Llama 70B": (
        llama_of_torchtitan(80, 8192, 28672, heads=64),
        70.6e9,
        (
            Mesh(shard=8, tensor=8),
            Mesh(shard=128, tensor=8),
            Mesh(replicate=16, shard=8, tensor=8),
            Mesh(shard=32, tensor=8, pipeline=4),
        ),
    ),
}
"""Matrices, number of all weights, and meshes of 64 and of 1024 ranks."""
TITAN = (
    Way("Muon owner", "Muon", True, "owner"),
    Way("Leon owner", "Leon", True, "owner"),
    Way("Leon owner, bf16 wire", "Leon", True, "owner", torch.bfloat16),
)


def print_torchtitan(tokens: int) -> None:
    """A table for the rank with most of each, with gradients of float32, torchtitan's default.

    AdamW's two moments lie where the weights do; its few flops per weight are not counted.

    Args:
        tokens: of a step, divided by all GPUs; forward and backward take 6 flops per weight and
            token.
    """
    head = f"{'GB sent':>10}{'Tflop':>9}{'of a step':>11}{'GB of state':>13}{'ranks at work':>15}"
    print(f"{tokens} tokens per GPU and step, the rank with most of each\n\n{'':58}{head}")
    for model, (params, weights, meshes) in RUNS.items():
        for mesh in meshes:
            stage = params[: len(params) // mesh.pipeline]
            ranks = mesh.replicate * mesh.shard * mesh.tensor
            name = f"{model}, {mesh}"
            kept = 8 * weights / (mesh.shard * mesh.tensor * mesh.pipeline)
            print(f"{name:36}{'AdamW':22}{0:10.3f}{0:9.2f}{0:11.1%}{kept / 1e9:13.3f}{'all':>15}")
            for way in TITAN:
                found = count(way, stage, ranks, 4, mesh.replicate)
                work, busy = max(found.flops), sum(x > 0 for x in found.flops)
                figures = f"{max(found.sent) / 1e9:10.3f}{work / 1e12:9.2f}"
                figures += f"{work / (6 * weights * tokens):11.1%}{max(found.state) / 1e9:13.3f}"
                print(f"{name:36}{way.name:22}{figures}{busy * mesh.pipeline:15}")


# ------------------------------------------------------------------ measured


def optimizer_of(
    way: Way,
    params: Sequence[Parameter],
    mesh: DeviceMesh | None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """An optimizer of weights with gradients, cut along their long side on the last axis of a mesh.

    On the axes before it, if any, they are replicated.
    """
    torch.manual_seed(0)

    def spread(x: Tensor) -> Tensor:
        if mesh is None:
            return x
        axis = 0 if x.shape[0] > x.shape[1] else 1
        return distribute_tensor(x, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(axis)])

    shapes = [(p.rows, p.columns) for p in params]
    weights = [spread(torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]
    for p in weights:
        p.grad = spread(torch.randn(p.shape, dtype=dtype))
    how = {"placement": way.placement, "wire_dtype": way.wire_dtype, "method": "polar-express"}
    group = {"params": weights, "axes": [p.axes for p in params]}
    return getattr(nucleon, way.method)([group], **how)


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


def _rank(rank: int, ranks: int, folder: str, shapes: list[Parameter], rounds: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    ways = [optimizer_of(way, shapes, mesh if way.sharded else None) for way in WAYS]
    torch.save([measure(o, rounds) for o in ways], f"{folder}/{ranks}.{rank}.pt")
    dist.destroy_process_group()


def print_measured(shapes: list[Parameter], rounds: int) -> None:
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
    parser.add_argument("--torchtitan", action="store_true", help="count for torchtitan's meshes")
    parser.add_argument("--tokens", type=int, default=8192, help="per GPU, with --torchtitan")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--link-gbps", type=float, help="gigabits a rank sends in a second")
    parser.add_argument("--tflops", type=float, help="10¹² flops that a rank does in a second")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    if chosen.torchtitan:
        print_torchtitan(chosen.tokens)
    elif chosen.counts:
        entry = getattr(torch, chosen.dtype).itemsize
        print_counts(chosen.counts, entry, chosen.link_gbps, chosen.tflops)
    else:
        print_measured(gpt(chosen.layers, chosen.width), chosen.rounds)


if __name__ == "__main__":
    main()
