"""Could Leon's float16 recursion do with fewer products? Variants of it, judged as it is.

    python benchmarks/half_variants.py                    # 64 and 256 rows, on a CPU

Each variant saves some of the 6m²n + 19m³ flops of a direction with its GGᵀ. The inputs, and what
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
from nucleon.linalg.coefficients import HALF_RESTART, Quintic, half_polar_express, image
from nucleon.linalg.kernels import (
    REMAINDER_SCALE,
    add_to_diagonal,
    symmetric_pair,
    symmetric_product,
)

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
    ends_cubic: bool = False


VARIANTS = (
    Variant("as it is", (6, 19)),
    Variant("remainder in FP8", (6, 18), remainder=torch.float8_e4m3fn),
    Variant("no remainder at the restart", (6, 17), remainder=None),
    Variant("Q of both halves first", (4, 21), together="full"),
    Variant("the same, symmetric", (4, 20), together="symmetric"),
    Variant("the last quintic a cubic", (6, 18), ends_cubic=True),
)


def sequence_of(variant: Variant) -> tuple[Quintic, ...]:
    """The usual one, or with the best cubic for where four steps end, at most 1 there."""
    usual = half_polar_express(5)
    if not variant.ends_cubic:
        return usual
    lower, upper = image(usual[:HALF_RESTART], 3e-3, 1.0)
    lower, upper = image(usual[HALF_RESTART:4], lower, 1.15 * upper)
    scale = math.sqrt(3 / (lower**2 + lower * upper + upper**2))
    return (*usual[:4], (1.5 * scale, -0.5 * scale**3, 0.0))


def direction(s: Tensor, smoothing: Tensor, variant: Variant) -> Tensor:
    """`half_augmented`, in the order of `half.augmented_factors`."""
    begin = half.start(s[None], smoothing[None])
    assert begin.remainder is not None
    x, r = begin.x, begin.r
    sequence = sequence_of(variant)
    q, first = r, r
    for i, (a, b, c) in enumerate(sequence):
        if i == HALF_RESTART:
            first = q
            r = restarted(begin, q, begin.remainder, variant.remainder)
        given = None if i else begin.scale
        if i in (0, HALF_RESTART):
            z, q = symmetric_pair(
                r, r, r, alpha=c, beta=b, second_shift=a, scale=given, powers=(2, 1)
            )
        else:
            z = symmetric_product(r, r, r, alpha=c, beta=b)
            length = begin.length if i == HALF_RESTART - 1 else None
            q = symmetric_product(q, z, q, beta=a, scale=length, powers=(1, 1))
        if i + 1 not in (HALF_RESTART, len(sequence)):
            rz = symmetric_product(r, z, r, beta=a, scale=given, powers=(1, 1))
            r = symmetric_product(z, rz, rz, beta=a)
            if not i:
                add_to_diagonal(r, begin.floor)
    if variant.together:
        both = symmetric_product(q, first) if variant.together == "symmetric" else q @ first
        return (both.float() @ x.float())[0]
    return (q.float() @ (first @ x).float())[0]


def restarted(begin: half.Start, q: Tensor, rest: Tensor, dtype: torch.dtype | None) -> Tensor:
    """QRQᵀ with its floor."""
    m = q.shape[-1]
    qr = q @ begin.r
    if dtype is not None:
        narrow = [y.to(dtype).half() for y in (q, rest)]
        qr = (narrow[0] @ narrow[1]).baddbmm_(q, begin.r, beta=1 / REMAINDER_SCALE)
    more = max(half.RESTART_FLOOR, half.SMOOTHED_FLOOR / math.sqrt(m))
    return symmetric_product(qr, q, alpha=begin.spread**2 / m, shift=more)


def report(variant: Variant, rows: Sequence[tuple[str, float, float, float]], label: str) -> None:
    """A line of the table."""
    wide, cubes = variant.flops
    outside = sum(norm > 1.01 for _, norm, _, _ in rows)
    broken = sum(not kept(*figures) for _, *figures in rows)
    mean = statistics.fmean(error for _, _, error, _ in rows)
    print(
        f"{label:8} {variant.name:28} {wide:2g}m²n + {cubes:2g}m³  largest ‖P‖_op "
        f"{max(row[1] for row in rows):9.4f}, above 1.01 {outside:3} of {len(rows)}, "
        f"mean error {mean:.3f}, broken {broken}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--clusters", type=int, default=10, help="draws of each kind of clusters")
    options = parser.parse_args()
    for m, variant in product(options.rows, VARIANTS):
        inputs = [(c, k, 0) for c, k in product(CASES, LAMBDAS) if k != "none"]
        inputs += product(CLUSTERS, ("own",), range(options.clusters))

        def found(s: Tensor, smoothing: Tensor, variant: Variant = variant) -> dict[str, Tensor]:
            return {"Leon": direction(s, smoothing, variant)}

        rows = [row for c, k, seed in inputs for row in judged(c, k, m, m, seed, "cpu", found)]
        report(variant, rows, f"{m}×{m}")


if __name__ == "__main__":
    main()
