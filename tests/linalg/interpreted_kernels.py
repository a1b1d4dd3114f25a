"""Run by `test_kernels.py` in a process with TRITON_INTERPRET=1: the kernels on the CPU.

No bfloat16: the interpreter multiplies its bit patterns.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers, also as a script

import interpreting  # noqa: F401  (patches the language once)
from helpers_half import check_grams_in_place
from nucleon.linalg import kernels, triton_symmetric
from soaking import some

assert triton_symmetric.INTERPRETED
for m, n in ((64, 64), (136, 40), (201, 75)):
    check_grams_in_place(m, n, triton_symmetric.IN_PLACE, "cpu")
generator = torch.Generator().manual_seed(0)
# With and without the copy engine for the operands, and for what is added and stored.
SHAPES = ((2, 5, 7), (1, 70, 33), (2, 130, 128), (2, 136, 64), (1, 64, 64), (2, 200, 40), (2, 7, 7))
KINDS = (("", [0, 0]), ("", [1, 1]), ("remainder", [1, 2]), ("shifted", [2, 1]))
CONFIGS = (*triton_symmetric.CONFIGS, triton_symmetric.IN_PLACE)
CASES = (
    (shape, dtype, number, config)
    for shape in SHAPES
    for dtype in (torch.float16, torch.float32)
    for number in range(len(KINDS))
    for config in (CONFIGS if shape[1] in (64, 130, 136) else (None,))
)
for (count, m, k), dtype, number, config in some(CASES):
    kind, powers = KINDS[number]
    # tf32 is for float32 only, and comes with float16 in a step; products are in full here.
    precision = "ieee" if dtype == torch.float32 and m % 2 else "tf32"
    x = torch.randn(count, m, k, generator=generator).to(dtype)
    c = torch.randn(count, m, m, generator=generator)
    c, scale = c + c.mT, torch.rand(count, generator=generator) + 0.5
    # A ≠ B with a symmetric ABᵀ: a polynomial of a symmetric matrix and that, or BR and B.
    r = torch.randn(count, k, k, generator=generator) / k**0.5
    r = (r + r.mT) / 2
    a, b = (r @ r - r, r) if m == k else (x.float() @ r, x)
    left, right = (a.to(dtype), b.to(dtype)) if number in (1, 2) else (x, x)
    addend = (None, c.to(dtype), c, c.to(dtype))[number]
    out = torch.full((count, m, m), torch.nan, dtype=dtype)
    second = torch.full_like(out, torch.nan)
    factors = [0.5, 2.0, 0.25, 3.0]
    rest = (factors, powers, precision, kind, kernels.REMAINDER_SCALE)
    norms = torch.full((count * math.comb(-(-m // 64) + 1, 2),), torch.nan)
    parts = triton_symmetric.symmetric(
        left, right, addend, scale, out, second, *rest, config, norms=norms
    )
    expected, other = kernels._symmetric_torch(
        left, right, addend, scale, factors, powers, dtype, precision, kind
    )
    assert torch.equal(out, out.mT), (m, k, dtype, kind)
    # Sums in another order: one rounding to float16, some of float32.
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-3}
    torch.testing.assert_close(out, expected, **close)
    norm = torch.linalg.vector_norm(out.float(), dim=(1, 2))
    found = norms[: count * parts].view(count, parts).sum(-1).sqrt()
    off = torch.finfo(dtype).eps + m * 2.0**-24  # of the entries, and of their sum
    torch.testing.assert_close(found, norm, rtol=off, atol=0.0)
    if kind == "shifted":
        torch.testing.assert_close(second, other, **close)
    if kind == "remainder":
        whole = out.double() + second.double() / kernels.REMAINDER_SCALE
        exact = expected.double() + other.double() / kernels.REMAINDER_SCALE
        torch.testing.assert_close(whole, exact, rtol=1e-5, atol=1e-4)
x = torch.randn(3, 7, 300, generator=generator)
factor = torch.tensor([1.0, 2.0, 3.0])
torch.testing.assert_close(triton_symmetric.squares(x), x.double().square().sum(dim=(1, 2)))
assert torch.equal(triton_symmetric.scaled_half(x, factor), (x * factor[:, None, None]).half())
print("all agree")
