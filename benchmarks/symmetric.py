"""Which tiles make the symmetric product fast? Configurations of its kernel, and of candidates.

    python benchmarks/symmetric.py                        # on a GPU, about two minutes
    TRITON_INTERPRET=1 python benchmarks/symmetric.py     # on a CPU: are they right?

For every shape αABᵀ + βC with C = B of square matrices, XXᵀ of wide ones, in float16: microseconds,
TFLOP/s of the triangle (m²n flops per matrix) and the time over that of torch.matmul's full
product, where 0.5 is the same rate. The rows "as it is" are `triton_symmetric.symmetric` with the
table `triton_symmetric.CONFIGS`; the others are the kernel below. It takes tiles of 128×128 or of
128×256, which load a quarter less for the same arithmetic, in the order of a table, one per program
or as many as programs fit on the device ("persistent"). "one store" leaves the mirrored tile out:
what it costs. Every configuration is compared with torch first.
"""
# ruff: noqa: N803, SIM102
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from _timing import environment
from nucleon.linalg.triton_symmetric import CONFIGS, INTERPRETED, boxes, symmetric

SHAPES = (
    (24, 1024, 1024),
    (8, 1024, 4096),
    (8, 2048, 2048),
    (4, 2048, 8192),
    (2, 4096, 4096),
    (1, 4096, 11008),
)
SMALL_SHAPES = ((2, 256, 256), (1, 384, 128))
TILE = 128


@dataclass(frozen=True)
class Candidate:
    """A way to cut the triangle and to go through it."""

    parts: int = 1
    """Tiles of 128×128 side by side in one program."""
    depth: int = 64
    warps: int = 8
    stages: int = 3
    strip: int = 0
    """Columns of tiles that are gone through together, from top to bottom; 0: row by row."""
    programs: int = 0
    """On a multiprocessor, each with many tiles; 0: one program per tile."""
    mirrored: bool = True

    def __str__(self) -> str:
        words = [f"128×{128 * self.parts}×{self.depth}, {self.warps} warps, {self.stages} stages"]
        words += [f"strips of {self.strip}"] * bool(self.strip)
        words += [f"persistent, {self.programs} each"] * bool(self.programs)
        words += ["one store"] * (not self.mirrored)
        return ", ".join(words)


CANDIDATES = (
    Candidate(),
    Candidate(mirrored=False),
    Candidate(stages=2),
    Candidate(strip=8),
    Candidate(strip=16),
    Candidate(programs=1),
    Candidate(depth=128, stages=2),
    Candidate(parts=2),
    Candidate(parts=2, mirrored=False),
    Candidate(parts=2, stages=4),
    Candidate(parts=2, strip=4),
    Candidate(parts=2, programs=1),
    Candidate(parts=2, depth=128, stages=2),
)


@triton.jit
def _keep(out, value, batch, i, j, TILE: tl.constexpr, MIRRORED: tl.constexpr):
    """Tile (i, j) of the lower triangle, and (j, i) with it."""
    if j <= i:
        if i == j:
            at = tl.arange(0, TILE)
            value = tl.where(at[:, None] >= at[None, :], value, value.T)
        out.store([batch, i * TILE, j * TILE], tl.reshape(value, (1, TILE, TILE)))
        if MIRRORED:  # known to the compiler, the other is not
            if i != j:
                out.store([batch, j * TILE, i * TILE], tl.reshape(value.T, (1, TILE, TILE)))


@triton.jit
def _tile(
    a, b, addend, out, places, number, each, depth, alpha, beta,
    ADDEND: tl.constexpr, MIRRORED: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Tile `number` of all matrices, `each` of every one."""
    WIDE: tl.constexpr = TILE * PARTS
    batch, place = number // each, number % each
    i, j = tl.load(places + 2 * place), tl.load(places + 2 * place + 1)
    total = tl.zeros((TILE, WIDE), dtype=tl.float32)
    if ADDEND:
        plus = tl.reshape(addend.load([batch, i * TILE, j * WIDE]), (TILE, WIDE))
        total = plus.to(tl.float32) * (beta / alpha)
    for k in range(0, depth, DEPTH):
        left = tl.reshape(a.load([batch, i * TILE, k]), (TILE, DEPTH))
        right = tl.reshape(b.load([batch, j * WIDE, k]), (WIDE, DEPTH))
        total = tl.dot(left, right.T, total)
    result = (total * alpha).to(tl.float16)
    if PARTS == 1:
        _keep(out, result, batch, i, j, TILE, MIRRORED)
    else:
        first, second = tl.split(tl.permute(tl.reshape(result, (TILE, 2, TILE)), (0, 2, 1)))
        _keep(out, first, batch, i, 2 * j, TILE, MIRRORED)
        _keep(out, second, batch, i, 2 * j + 1, TILE, MIRRORED)


@triton.jit
def _product(
    a, b, addend, out, places, tiles, each, depth, alpha, beta,
    ADDEND: tl.constexpr, MIRRORED: tl.constexpr, PERSISTENT: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    if PERSISTENT:
        for number in range(first, tiles, tl.num_programs(0)):
            _tile(
                a, b, addend, out, places, number, each, depth, alpha, beta,
                ADDEND, MIRRORED, TILE, PARTS, DEPTH,
            )  # fmt: skip
    else:
        _tile(
            a, b, addend, out, places, first, each, depth, alpha, beta,
            ADDEND, MIRRORED, TILE, PARTS, DEPTH,
        )  # fmt: skip


def order(m: int, parts: int, strip: int) -> list[tuple[int, int]]:
    """(i, j) of the tiles that have an entry of the lower triangle."""
    found = [(i, j) for i in range(triton.cdiv(m, TILE)) for j in range(i // parts + 1)]
    return sorted(found, key=lambda at: at[1] // strip) if strip else found


def launch(
    candidate: Candidate, a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor
) -> Callable[[], object]:
    """ABᵀ/2 + 2C, ready to be launched."""
    places = order(a.shape[1], candidate.parts, candidate.strip)
    table = torch.tensor(places, dtype=torch.int32, device=a.device)
    tiles, wide = len(places) * len(a), TILE * candidate.parts
    programs = tiles
    if candidate.programs:
        one = 1 if INTERPRETED else torch.cuda.get_device_properties(a.device).multi_processor_count
        programs = min(tiles, candidate.programs * one)
    left, right = boxes(a, TILE, candidate.depth), boxes(b, wide, candidate.depth)
    plus, result = boxes(out if addend is None else addend, TILE, wide), boxes(out, TILE, TILE)
    return lambda: _product[(programs,)](
        left, right, plus, result, table, tiles, len(places), a.shape[2], 0.5, 2.0,
        ADDEND=addend is not None, MIRRORED=candidate.mirrored,
        PERSISTENT=bool(candidate.programs), TILE=TILE, PARTS=candidate.parts,
        DEPTH=candidate.depth, num_warps=candidate.warps, num_stages=candidate.stages,
    )  # fmt: skip


def products(
    a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor
) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Name, launch, and whether both triangles are stored."""
    for config in CONFIGS:
        tile, depth = config.kwargs["TILE"], config.kwargs["DEPTH"]
        name = f"{tile}×{tile}×{depth}, {config.num_warps} warps, {config.num_stages} stages"
        rest = ([0.5, 2.0, 0.0], [0, 0], "tf32", "", 1.0, config)
        yield f"as it is: {name}", partial(symmetric, a, b, addend, None, out, out, *rest), True
    for candidate in CANDIDATES:
        yield str(candidate), launch(candidate, a, b, addend, out), candidate.mirrored


def right(run: Callable[[], object], out: Tensor, expected: Tensor, both: bool) -> bool:
    """Whether the result is symmetric and the expected one up to a rounding of float16."""
    out.fill_(torch.nan)
    run()
    close = torch.allclose(out.tril().float(), expected.tril(), rtol=2e-3, atol=2e-3)
    return close and (not both or torch.equal(out, out.mT))


def operands(count: int, m: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and C: two commuting symmetric matrices and the second; or X, X and nothing."""
    x = torch.randn(count, m, n, device=device) / n**0.5
    if n != m:
        return x.half(), x.half(), None
    b = ((x + x.mT) / 2).half()
    a = (b.float() @ b.float()).half()
    return (a + a.mT) / 2, b, b


def report(count: int, m: int, n: int, device: str) -> None:
    """The lines of one shape, the fastest first."""
    a, b, addend = operands(count, m, n, device)
    b = a if n != m else b
    out = torch.empty(count, m, m, dtype=torch.float16, device=device)
    expected = a.float() @ b.float().mT / 2 + (0 if addend is None else 2 * addend.float())
    times: dict[str, float] = {}
    for name, run, both in products(a, b, addend, out):
        try:
            if not right(run, out, expected, both):
                raise SystemExit(f"wrong: {name}, {count}×{m}×{n}")
        except OutOfResources:
            print(f"  {name}: too much shared memory")
            continue
        times[name] = 0.0 if INTERPRETED else triton.testing.do_bench(run, warmup=10, rep=60)
    if INTERPRETED:
        print(f"{count}×{m}×{n}: {len(times)} configurations are right", flush=True)
        return
    full = triton.testing.do_bench(lambda: torch.matmul(a, b.mT), warmup=10, rep=60)
    rate = count * m * m * n / 1e9
    print(f"{count}×{m}×{n}: torch.matmul {full * 1e3:.0f} µs, {2 * rate / full:.0f} TFLOP/s")
    for name, time in sorted(times.items(), key=lambda item: item[1]):
        print(f"  {time * 1e3:7.1f} µs {rate / time:5.0f} TFLOP/s {time / full:6.3f}  {name}")
    print(end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", nargs="+", help="batch, m and n as 8x2048x2048")
    options = parser.parse_args()
    device = "cpu" if INTERPRETED else "cuda"
    torch.manual_seed(0)
    print(environment(torch.device(device)), f"Triton {triton.__version__}", sep=", ")
    shapes = SMALL_SHAPES if INTERPRETED else SHAPES
    for shape in [tuple(map(int, x.split("x"))) for x in options.shape or ()] or shapes:
        report(*shape, device)


if __name__ == "__main__":
    main()
