"""Which tiles make the symmetric product fast? Configurations of its kernel, and of candidates.

    python benchmarks/symmetric.py                        # on a GPU, about two minutes
    python benchmarks/symmetric.py --fine                 # the fine diagonal beside what is there
    TRITON_INTERPRET=1 python benchmarks/symmetric.py     # on a CPU: are they right?
    python benchmarks/symmetric.py --count                # tiles and rounds, on any machine

For every shape αABᵀ + βC with C = B of square matrices, XXᵀ of wide ones, in float16: microseconds,
TFLOP/s of the triangle (m²n flops per matrix) and the time over that of torch.matmul's full
product, where 0.5 is the same rate. The rows "as it is" are `triton_symmetric.symmetric` with the
table `triton_symmetric.CONFIGS`; the others are the kernel below. It takes tiles of 128×128 or of
128×256, which load a quarter less for the same arithmetic, in the order of a table, one per program
or as many as programs fit on the device ("persistent"). "one store" leaves the mirrored tile out:
what it costs. "fine diagonal": a tile of 128×128 on the diagonal becomes the three of 64×64 that
are not above it. They come after all others, so that they fill the last round of programs, and are
a quarter less work. With --fine also the two products that add a float32 matrix are timed, M̂ ←
(M̂ + XXᵀ)/2 in place, and the same as a float16 matrix and its remainder. Every configuration is
compared with torch in float64 first.
"""
# ruff: noqa: N803, SIM102, SIM114
# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import argparse
import heapq
import statistics
from collections.abc import Callable, Iterator, Sequence
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
SMALL_SHAPES = ((2, 256, 256), (1, 384, 128), (2, 200, 200))
FINE_SHAPES = (
    (24, 1024, 1024),
    (8, 1024, 1024),
    (8, 2048, 2048),
    (4, 2048, 2048),
    (1, 2048, 2048),
    (2, 4096, 4096),
    (1, 4096, 11008),
)
TILE, FINE = 128, 64
PLACES = 2 * 132
"""Programs that run at once on an H200, two on a multiprocessor."""


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
    fine: int = 0
    """Depth of the 64×64 tiles on the diagonal; 0: they are as the others."""
    fine_stages: int = 3

    def __str__(self) -> str:
        words = [f"128×{128 * self.parts}×{self.depth}, {self.warps} warps, {self.stages} stages"]
        words += [f"strips of {self.strip}"] * bool(self.strip)
        words += [f"persistent, {self.programs} each"] * bool(self.programs)
        words += ["one store"] * (not self.mirrored)
        words += [f"fine diagonal 64×64×{self.fine}, {self.fine_stages} stages"] * bool(self.fine)
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
FINE_CANDIDATES = (
    Candidate(),
    Candidate(fine=64),
    Candidate(fine=64, fine_stages=5),
    Candidate(fine=128),
    Candidate(warps=4, fine=64),
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
    TILE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile `number` of all matrices, `each` of every one."""
    WIDE: tl.constexpr = TILE * PARTS
    batch, place = number // each, number % each
    i, j = tl.load(places + 2 * place), tl.load(places + 2 * place + 1)
    total = tl.zeros((TILE, WIDE), dtype=tl.float32)
    if ADDEND:
        plus = tl.reshape(addend.load([batch, i * TILE, j * WIDE]), (TILE, WIDE))
        total = plus.to(tl.float32) * (beta / alpha)
    for k in tl.range(0, depth, DEPTH, num_stages=STAGES):
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


@triton.jit(do_not_specialize=["tiles", "each", "each_fine"])
def _product(
    a, b, addend, out, places, a_fine, b_fine, addend_fine, out_fine, places_fine,
    tiles, each, each_fine, depth, alpha, beta,
    ADDEND: tl.constexpr, MIRRORED: tl.constexpr, PERSISTENT: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    FINE: tl.constexpr, FINE_DEPTH: tl.constexpr, FINE_STAGES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    if PERSISTENT:
        for number in range(first, tiles, tl.num_programs(0)):
            _tile(
                a, b, addend, out, places, number, each, depth, alpha, beta,
                ADDEND, MIRRORED, TILE, PARTS, DEPTH, STAGES,
            )  # fmt: skip
    elif FINE_DEPTH == 0:
        _tile(
            a, b, addend, out, places, first, each, depth, alpha, beta,
            ADDEND, MIRRORED, TILE, PARTS, DEPTH, STAGES,
        )  # fmt: skip
    elif first < tiles:
        _tile(
            a, b, addend, out, places, first, each, depth, alpha, beta,
            ADDEND, MIRRORED, TILE, PARTS, DEPTH, STAGES,
        )  # fmt: skip
    else:
        _tile(
            a_fine, b_fine, addend_fine, out_fine, places_fine, first - tiles, each_fine,
            depth, alpha, beta, ADDEND, MIRRORED, FINE, 1, FINE_DEPTH, FINE_STAGES,
        )  # fmt: skip


Places = list[tuple[int, int]]


def order(m: int, candidate: Candidate) -> tuple[Places, Places]:
    """(i, j) of the tiles that have an entry of the lower triangle, and of the fine ones."""
    rows, parts, strip = triton.cdiv(m, TILE), candidate.parts, candidate.strip
    if candidate.fine:
        fine = triton.cdiv(m, FINE)
        near = [(i, j) for i in range(fine) for j in range(i // 2 * 2, i + 1)]
        return [(i, j) for i in range(rows) for j in range(i)], near
    found = [(i, j) for i in range(rows) for j in range(i // parts + 1)]
    return sorted(found, key=lambda at: at[1] // strip) if strip else found, []


def launch(
    candidate: Candidate, a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor
) -> Callable[[], object]:
    """ABᵀ/2 + 2C, ready to be launched."""
    places, near = order(a.shape[1], candidate)
    tiles = len(places) * len(a)
    programs = tiles + len(near) * len(a)
    if candidate.programs:
        one = 1 if INTERPRETED else torch.cuda.get_device_properties(a.device).multi_processor_count
        programs = min(tiles, candidate.programs * one)

    def given(found: Places, high: int, parts: int, depth: int) -> list[object]:
        wide, plus = high * parts, out if addend is None else addend
        table = torch.tensor(found, dtype=torch.int32, device=a.device)
        left, right = boxes(a, high, depth), boxes(b, wide, depth)
        return [left, right, boxes(plus, high, wide), boxes(out, high, high), table]

    large = given(places, TILE, candidate.parts, candidate.depth)
    fine = given(near, FINE, 1, candidate.fine) if near else large
    return lambda: _product[(programs,)](
        *large, *fine, tiles, len(places), len(near), a.shape[2], 0.5, 2.0,
        ADDEND=addend is not None, MIRRORED=candidate.mirrored,
        PERSISTENT=bool(candidate.programs), TILE=TILE, PARTS=candidate.parts,
        DEPTH=candidate.depth, STAGES=candidate.stages, FINE=FINE, FINE_DEPTH=candidate.fine,
        FINE_STAGES=candidate.fine_stages, num_warps=candidate.warps, num_stages=candidate.stages,
    )  # fmt: skip


def products(
    a: Tensor, b: Tensor, addend: Tensor | None, out: Tensor, candidates: Sequence[Candidate]
) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """Name, launch, and whether both triangles are stored."""
    for config in CONFIGS:
        tile, depth = config.kwargs["TILE"], config.kwargs["DEPTH"]
        name = f"{tile}×{tile}×{depth}, {config.num_warps} warps, {config.num_stages} stages"
        rest = ([0.5, 2.0, 0.0], [0, 0], "tf32", "", 1.0, config)
        yield f"as it is: {name}", partial(symmetric, a, b, addend, None, out, out, *rest), True
    for candidate in candidates:
        yield str(candidate), launch(candidate, a, b, addend, out), candidate.mirrored


def precise(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and launch of the products that add a float32 matrix, each checked."""
    count, m, _ = x.shape
    gram = torch.randn(count, m, m, device=x.device)
    gram += gram.mT.clone()
    first = gram.clone()
    exact = (first.double() + x.double() @ x.double().mT) / 2
    table = torch.tensor([each.data_ptr() for each in gram], device=x.device)
    value, remainder = (x.new_empty(count, m, m) for _ in range(2))
    large = {"TILE": TILE, "DEPTH": 64}
    configs = {
        "128×128×64": triton.Config(large, num_warps=8, num_stages=3),
        "128×128×64, fine diagonal": triton.Config({**large, "FINE": 1}, num_warps=8, num_stages=3),
        "128×128×64, fine diagonal, 128 registers": triton.Config(
            {**large, "FINE": 1}, num_warps=8, num_stages=3, maxnreg=128
        ),
    }
    for name, config in configs.items():
        rest = ([0.5, 0.5, 0.0], [0, 0], "tf32")
        for kind, out, other in (("", table, table), ("remainder", value, remainder)):
            run = partial(symmetric, x, x, table, None, out, other, *rest, kind, 2048.0, config)
            gram.copy_(first)
            run()
            found = value.double() + remainder.double() / 2048 if kind else gram.double()
            if not torch.allclose(found, exact, rtol=1e-5, atol=3e-4):
                raise SystemExit(f"wrong: {kind or 'in place'}, {name}, {tuple(x.shape)}")
            yield f"{kind or 'in place'}: {name}", run


def right(run: Callable[[], object], out: Tensor, expected: Tensor, both: bool) -> bool:
    """Whether the result is symmetric and the expected one up to a rounding of float16."""
    out.fill_(torch.nan)
    run()
    close = torch.allclose(out.tril().double(), expected.tril(), rtol=2e-3, atol=2e-3)
    return close and (not both or torch.equal(out, out.mT))


def operands(count: int, m: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and C: two commuting symmetric matrices and the second; or X, X and nothing."""
    x = torch.randn(count, m, n, device=device) / n**0.5
    if n != m:
        return x.half(), x.half(), None
    b = ((x + x.mT) / 2).half()
    a = (b.float() @ b.float()).half()
    return (a + a.mT) / 2, b, b


def end(tiles: int, fine: int) -> float:
    """When the last program ends: 1 is the time of a tile, 1/4 that of a fine one."""
    ends = [0.0] * PLACES
    for number in range(tiles + fine):
        heapq.heapreplace(ends, ends[0] + (1.0 if number < tiles else 0.25))
    return max(ends)


def count_tiles(count: int, m: int, n: int) -> None:
    """Print the tiles of a launch, and the share of places that are idle until its end."""
    words = list[str]()
    for candidate in (Candidate(), Candidate(fine=64)):
        tiles, fine = (count * len(found) for found in order(m, candidate))
        work, last = (tiles + fine / 4) / PLACES, end(tiles, fine)
        small = f" + {fine} fine" if fine else ""
        words.append(f"{tiles}{small} tiles, {work:.2f} rounds, {last:.2f} with the last one")
        words[-1] += f", {1 - work / last:.0%} idle"
    print(f"{count}×{m}×{n}: {'; '.join(words)}")


def report(count: int, m: int, n: int, device: str, *, fine: bool, rounds: int) -> None:
    """The lines of one shape, the fastest first."""
    a, b, addend = operands(count, m, n, device)
    b = a if n != m else b
    out = torch.empty(count, m, m, dtype=torch.float16, device=device)
    expected = a.double() @ b.double().mT / 2 + (0 if addend is None else 2 * addend.double())
    candidates = FINE_CANDIDATES if fine else CANDIDATES + FINE_CANDIDATES[1:]
    calls: dict[str, Callable[[], object]] = {}
    for name, run, both in products(a, b, addend, out, candidates):
        try:
            if not right(run, out, expected, both):
                raise SystemExit(f"wrong: {name}, {count}×{m}×{n}")
        except OutOfResources:
            print(f"  {name}: too much shared memory")
            continue
        calls[name] = run
    calls |= dict(precise(a)) if fine else {}
    if INTERPRETED:
        print(f"{count}×{m}×{n}: {len(calls)} configurations are right", flush=True)
        return
    bench = partial(triton.testing.do_bench, warmup=10, rep=40, return_mode="median")
    # In turn, as the clock of the device may change meanwhile.
    found = [{name: bench(run) for name, run in calls.items()} for _ in range(rounds)]
    times = {name: statistics.median(each[name] for each in found) for name in calls}
    full = bench(lambda: torch.matmul(a, b.mT))
    rate = count * m * m * n / 1e9
    print(f"{count}×{m}×{n}: torch.matmul {full * 1e3:.0f} µs, {2 * rate / full:.0f} TFLOP/s")
    for name, time in sorted(times.items(), key=lambda item: item[1]):
        print(f"  {time * 1e3:7.1f} µs {rate / time:5.0f} TFLOP/s {time / full:6.3f}  {name}")
    print(end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", nargs="+", help="batch, m and n as 8x2048x2048")
    parser.add_argument("--fine", action="store_true", help="of the candidates the fine ones")
    parser.add_argument("--rounds", type=int, default=1, help="the median of so many timings")
    parser.add_argument("--count", action="store_true", help="count the tiles, time nothing")
    options = parser.parse_args()
    shapes = FINE_SHAPES if options.fine or options.count else SHAPES
    shapes = SMALL_SHAPES if INTERPRETED else shapes
    shapes = [tuple(map(int, x.split("x"))) for x in options.shape or ()] or shapes
    if options.count:
        for shape in shapes:
            count_tiles(*shape)
        return
    device = "cpu" if INTERPRETED else "cuda"
    torch.manual_seed(0)
    print(environment(torch.device(device)), f"Triton {triton.__version__}", sep=", ")
    for shape in shapes:
        report(*shape, device, fine=options.fine, rounds=options.rounds)


if __name__ == "__main__":
    main()
