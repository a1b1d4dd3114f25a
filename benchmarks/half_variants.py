"""Could Leon's float16 recursion do with fewer products? Variants of it, judged as it is.

    python benchmarks/half_variants.py                    # 64 and 256 rows, on a CPU

Each variant changes some of the 6m²n + 18m³ flops of a direction with its GGᵀ. The inputs, and what
is asked, are those of `tests/half_contract.py`: ‖P‖_op ≤ 1.01, and an error no larger than the
larger of 0.04 and that of Jordan's five bfloat16 steps.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from nucleon.linalg import half
from nucleon.linalg.coefficients import (
    HALF_LOWER_BOUND,
    HALF_RESTART,
    HALF_SQUARES,
    SAFETY,
    Quintic,
    half_polar_express,
    image,
    polar_express,
)
from nucleon.linalg.kernels import (
    REMAINDER_SCALE,
    add_to_diagonal,
    symmetric_product,
)
from nucleon.linalg.roots import cholesky_root

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from half_contract import CASES, CLUSTERS, LAMBDAS, judged, kept


@dataclass(frozen=True)
class Variant:
    """What is left out or done otherwise, and the flops (m²n, m³) of a step with it."""

    name: str
    flops: tuple[float, float]
    remainder: torch.dtype | None = torch.float16
    """Of the product with the first R's remainder at the restart, which FP8 halves."""
    together: str = ""
    """Whether Q of both halves is multiplied first, by a "full" product or a "symmetric" one."""
    degrees: tuple[int, ...] = ()
    """Of polynomials after the restart. The first has its Q for nothing, the last no R; a cubic has
    its Z for nothing, so it takes Q and two products for R, one less than a quintic."""
    squares: tuple[Quintic, ...] = HALF_SQUARES
    """Where there are none, Q ← αQ² + βR + δI for each (α, β, δ), from Q = R; R stays as it is."""
    bfloat16: int = 0
    """In how many bfloat16 parts Q is for the product with a first R of two such, eight bits each;
    their matrix units take no float16 beside bfloat16. The product of the lower parts is left out.
    """
    restart: str = "QRQᵀ"
    """What R is made of: "QRQᵀ", the same with QR by the symmetric kernel ("triangle"), XXᵀ + QΛQᵀ
    with Λ to eleven bits ("smoothing"), or [QX QL] with Cholesky's L in float16 ("root")."""


THREE_SQUARES = (
    (0.602724, -3.032628, 3.105577),
    (0.209451, 0.337755, -0.446922),
    (1.0, -0.414131, 1.407656),
)
"""Least squares of rising powers towards the minimax, at most 1 on [0, 1.918]."""

VARIANTS = (
    Variant("as it is", (6, 18)),
    Variant("remainder in FP8", (6, 17), remainder=torch.float8_e4m3fn),
    Variant("no remainder at the restart", (6, 16), remainder=None),
    Variant("Q of both halves first", (4, 20), together="full"),
    Variant("the same, symmetric", (4, 19), together="symmetric"),
    Variant("three squares", (6, 17), squares=THREE_SQUARES),
    Variant("two quintics", (6, 19), degrees=(5, 5)),
    Variant("a quintic and a cubic", (6, 18), degrees=(5, 3)),
    Variant("a cubic and a quintic", (6, 18), degrees=(3, 5)),
    Variant("a quintic and two cubics", (6, 21), degrees=(5, 3, 3)),
    Variant("two cubics and a quintic", (6, 21), degrees=(3, 3, 5)),
    Variant("two cubics", (6, 17), degrees=(3, 3)),
    Variant("three cubics", (6, 20), degrees=(3, 3, 3)),
    Variant("R of two bfloat16, Q of one", (6, 18), bfloat16=1),
    Variant("R and Q of two bfloat16", (6, 20), bfloat16=2),
    Variant("from [QX QL], L Cholesky's", (7, 16 + 1 / 3), restart="root"),
    Variant("QR by the symmetric kernel", (6, 16), restart="triangle"),
    Variant("from QX and Λ to 11 bits", (7, 16), restart="smoothing"),
)


def polynomials(degrees: Sequence[int]) -> list[Quintic]:
    """Of such degrees after the restart, with the rooms of `half_polar_express`."""
    found: list[Quintic] = []
    lower, upper = image(half_polar_express(5)[:HALF_RESTART], HALF_LOWER_BOUND, 1.0)
    for i, degree in enumerate(degrees):
        upper *= 1 + (SAFETY if i else 0.15)
        p = cubic(lower, upper) if degree == 3 else quintic(lower, upper)
        ends = image([p], lower, upper)
        a, b, c = (k / (ends[1] if i + 1 == len(degrees) else sum(ends) / 2) for k in p)
        found.append((a, b, c))
        lower, upper = image([(a, b, c)], lower, upper)
    return found


def cubic(lower: float, upper: float) -> Quintic:
    """The best on [lower, upper] but for a factor: equal at both ends, 1 between them."""
    scale = math.sqrt(3 / (lower**2 + lower * upper + upper**2))
    return (1.5 * scale, -0.5 * scale**3, 0.0)


def quintic(lower: float, upper: float) -> Quintic:
    """The best on [lower, upper]."""
    ((a, b, c),) = polar_express(lower / upper, 1, safety=0.0)
    return (a / upper, b / upper**3, c / upper**5)


def direction(s: Tensor, smoothing: Tensor, variant: Variant) -> Tensor:
    """`half_augmented`, in the order of `half.augmented_factors`."""
    begin = half.start(s[None], smoothing[None])
    first = half.before_restart(begin, half_polar_express(5))
    if variant.bfloat16 == 1:
        first = first.bfloat16().half()
    r = restarted(begin, first, variant, smoothing[None] / squared_size(s, smoothing))
    q = after_restart(r, polynomials(variant.degrees)) if variant.degrees else r
    if not variant.degrees:
        for alpha, beta, delta in variant.squares:
            q = symmetric_product(q, q, r, alpha=alpha, beta=beta, shift=delta)
    if variant.together:
        both = symmetric_product(q, first) if variant.together == "symmetric" else q @ first
        return (both.float() @ begin.x.float())[0]
    return (q.float() @ (first @ begin.x).float())[0]


def squared_size(s: Tensor, smoothing: Tensor) -> Tensor:
    """‖[S L]‖_F²."""
    return s.square().sum() + smoothing.trace()


def restarted(begin: half.Start, q: Tensor, variant: Variant, smoothing: Tensor) -> Tensor:
    """QRQᵀ with its floor; Λ is given over ‖[S L]‖_F²."""
    assert begin.remainder is not None
    if variant.restart == "root":
        return from_root(begin, q, smoothing)
    m, rest = q.shape[-1], begin.remainder
    more = max(half.RESTART_FLOOR, half.SMOOTHED_FLOOR / math.sqrt(m))
    if variant.restart == "smoothing":
        x = q @ begin.x
        gram = symmetric_product(x, x)
        product = q @ (m * smoothing).half()
        return symmetric_product(product, q, gram, alpha=begin.spread**2 / m, shift=more)
    qr = q @ begin.r
    if variant.restart == "triangle":
        lower = symmetric_product(q, rest)
        qr = symmetric_product(q, begin.r, lower, beta=1 / REMAINDER_SCALE)
    elif variant.bfloat16:
        high, low = bfloat16_parts(begin.r.float() + rest.float() / REMAINDER_SCALE)
        upper, lower = bfloat16_parts(q.float())
        qr = (upper @ high + upper @ low + lower @ high).half()  # lower is 0 where Q is of one
    elif variant.remainder is not None:
        narrow = [y.to(variant.remainder).half() for y in (q, rest)]
        qr = (narrow[0] @ narrow[1]).baddbmm_(q, begin.r, beta=1 / REMAINDER_SCALE)
    return symmetric_product(qr, q, alpha=begin.spread**2 / m, shift=more)


def from_root(begin: half.Start, q: Tensor, smoothing: Tensor) -> Tensor:
    """YYᵀ of Y = [QX QL], semidefinite as it is, so that the floor of one without Λ will do."""
    root = (begin.spread * cholesky_root(smoothing)[0]).half()
    y = torch.cat([q @ begin.x, q @ root], dim=-1)
    return symmetric_product(y, y, shift=half.RESTART_FLOOR)


def after_restart(r: Tensor, sequence: Sequence[Quintic]) -> Tensor:
    """Q of cubics and quintics in R."""
    q = r
    for i, (a, b, c) in enumerate(sequence):
        z = symmetric_product(r, r, r, alpha=c, beta=b) if c else b * r
        q = symmetric_product(q, z, q, beta=a) if i else add_to_diagonal(z.clone(), a)
        if i + 1 < len(sequence):
            rz = symmetric_product(r, z, r, beta=a)
            r = symmetric_product(z, rz, rz, beta=a)
    return q


def bfloat16_parts(a: Tensor) -> tuple[Tensor, Tensor]:
    """A to sixteen bits as a sum of two, in float32, whose products of bfloat16 are exact."""
    high = a.bfloat16().float()
    return high, (a - high).bfloat16().float()


def report(variant: Variant, rows: Sequence[tuple[str, float, float, float]], label: str) -> None:
    """A line of the table."""
    wide, cubes = variant.flops
    outside = sum(norm > 1.01 for _, norm, _, _ in rows)
    broken = sum(not kept(*figures) for _, *figures in rows)
    mean = statistics.fmean(error for _, _, error, _ in rows)
    print(
        f"{label:8} {variant.name:28} {wide:2g}m²n + {cubes:<4.3g}m³  largest ‖P‖_op "
        f"{max(row[1] for row in rows):9.4f}, above 1.01 {outside:3} of {len(rows)}, "
        f"mean error {mean:.3f}, broken {broken}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--only", nargs="+", default=[""], help="variants with this in their name")
    parser.add_argument("--clusters", type=int, default=10, help="draws of each kind of clusters")
    options = parser.parse_args()
    chosen = [v for v in VARIANTS if any(part in v.name for part in options.only)]
    for m, variant in product(options.rows, chosen):
        inputs = [(c, k, 0) for c, k in product(CASES, LAMBDAS) if k != "none"]
        inputs += product(CLUSTERS, ("own",), range(options.clusters))

        def found(s: Tensor, smoothing: Tensor, variant: Variant = variant) -> dict[str, Tensor]:
            return {"Leon": direction(s, smoothing, variant)}

        rows = [row for c, k, seed in inputs for row in judged(c, k, m, m, seed, "cpu", found)]
        report(variant, rows, f"{m}×{m}")


if __name__ == "__main__":
    main()
