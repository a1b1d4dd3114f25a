"""Cases of the products of `linalg`, by torch, Triton's interpreter and a GPU, against float64."""

import math

import torch

from nucleon.linalg import kernels

KINDS = {
    "plain": ("", 0, (0, 0)),
    "added": ("", 1, (1, 1)),
    "remainder": ("remainder", 2, (1, 2)),
    "shifted": ("shifted", 1, (2, 1)),
}
"""Second result, addend (none, float16 or float32) and powers of a product."""


def grams_in_place(device, m, n):
    """M̂ ← κM̂ + β²XXᵀ of four matrices in two tensors; where β = 0 and κ = 1 every bit stays."""
    from nucleon.linalg import triton_symmetric  # which not every machine has

    generator = torch.Generator().manual_seed(m)
    x = torch.randn(4, m, n, generator=generator).half().to(device)
    before = torch.randn(2, 2, m, m, generator=generator)
    before = (before + before.mT).to(device)
    before[0, 1, 0, m - 1] = before[0, 1, m - 1, 0] = -0.0  # whose sign a sum would lose
    before[1, 1, 3, 3] = math.nan
    beta, kept = torch.tensor([[0.5, 0.0, 2.0, 0.0], [0.9, 1.0, 0.0, 1.0]], device=device)
    grams = [tensor.clone() for tensor in before]
    table = torch.tensor([gram.data_ptr() for gram in grams], device=device)
    options = {"scale": beta, "addend_scale": kept, "powers": (2, 1), "each": 2}
    options["config"] = triton_symmetric.LARGE
    triton_symmetric.symmetric(x, x, table, addend=table, **options)
    found, before = torch.cat(grams), before.flatten(0, 1)
    for i in (1, 3):
        assert torch.equal(found[i].view(torch.int32), before[i].view(torch.int32)), (m, n, i)
    for i in (0, 2):
        wide, old = x[i].double(), kept[i].double() * before[i].double()
        sizes = beta[i] ** 2 * wide.abs() @ wide.abs().mT + old.abs()
        difference = (found[i] - (beta[i].double() ** 2 * wide @ wide.mT + old)).abs()
        assert (difference <= (n + 4) * 2**-24 * sizes).all(), (m, n, i)
        assert torch.equal(found[i], found[i].mT)


def product(device, shape, kind, tiles):
    """αs^p ABᵀ + βs^q C + δI, its second result and norm, by torch or with numbered tiles."""
    (count, m, depth), (kind, addend, powers) = shape, KINDS[kind]
    generator = torch.Generator().manual_seed(m)

    def drawn(*sizes):
        return torch.randn(sizes, generator=generator).to(device)

    # A ≠ B with a symmetric ABᵀ: a polynomial of a symmetric matrix and that, or BR and B.
    x, r, c = drawn(count, m, depth), drawn(count, depth, depth) / depth**0.5, drawn(count, m, m)
    r, c, scale = (r + r.mT) / 2, c + c.mT, drawn(count).abs() + 0.5
    a, b = (x, x) if kind == "shifted" else (r @ r - r, r) if m == depth else (x @ r, x)
    a, b, c = a.half(), b.half(), c.half() if addend == 1 else c
    c, terms = c if addend else None, {"alpha": 0.5, "beta": 2.0, "shift": 0.25, "scale": scale}
    terms |= {"second_shift": 3.0, "powers": powers, "kind": kind}
    eps = torch.finfo(torch.float16).eps
    if tiles == "torch":
        out, second = kernels.symmetric_pair(a, b, c, **terms)
    else:
        from nucleon.linalg import triton_symmetric  # which not every machine has

        out = torch.full((count, m, m), torch.nan, dtype=torch.float16, device=device)
        second = torch.full_like(out, torch.nan)
        norms = torch.full((count * math.comb(-(-m // 64) + 1, 2),), torch.nan, device=device)
        config = None if tiles is None else triton_symmetric.CONFIGS[tiles]
        parts = triton_symmetric.symmetric(
            a, b, out, second, addend=c, norms=norms, config=config, **terms
        )
        norm = norms[: count * parts].view(count, parts).sum(-1).sqrt()
        exact = torch.linalg.vector_norm(out.double(), dim=(1, 2)).float()
        torch.testing.assert_close(norm, exact, rtol=eps + m * 2.0**-24, atol=0.0)
    p, q = (scale.double()[:, None, None] ** power for power in powers)
    plus = 2 * q * c.double() if addend else torch.zeros_like(out, dtype=torch.float64)
    left, right, eye = a.double(), b.double(), torch.eye(m, dtype=torch.float64, device=device)
    expected = 0.5 * p * left @ right.mT + plus + 0.25 * eye
    # One rounding to float16 after float32 sums of `depth` products, against the sizes summed.
    sizes = 0.5 * p * left.abs() @ right.abs().mT + plus.abs() + 4
    # Rounded operands commute nearly: one triangle is computed.
    expected, sizes = (x.tril() + x.tril(-1).mT for x in (expected, sizes))
    sums = depth * 2**-24 * sizes
    assert out.dtype == torch.float16
    assert torch.equal(out, out.mT)
    assert ((out - expected).abs() <= eps * sizes + sums).all()
    if kind == "shifted":
        assert ((second - expected - 3 * eye).abs() <= eps * sizes + sums).all()
    if kind == "remainder":
        whole = out.double() + second.double() / 2048
        assert ((whole - expected).abs() <= eps**2 * sizes + sums).all()


def elementwise(device, by="triton"):
    if by == "triton":
        from nucleon.linalg import triton_symmetric as module  # which not every machine has
    else:
        module = kernels
    x = torch.randn(3, 7, 300, generator=torch.Generator().manual_seed(0)).to(device)
    factor = torch.tensor([1.0, 2.0, 3.0], device=device)
    for y in (x, x * 1e30):
        torch.testing.assert_close(module.squares(y), y.double().square().sum(dim=(1, 2)))
    assert torch.equal(module.scaled_half(x, factor), (x * factor[:, None, None]).half())


# With and without the copy engine for the operands, and for what is added and stored.
SHAPES = ((2, 5, 7), (1, 70, 33), (2, 130, 128), (2, 136, 64), (1, 64, 64), (2, 200, 40), (2, 7, 7))
CASES = {
    f"{kind} {shape} {tiles}": (product, {"shape": shape, "kind": kind, "tiles": tiles})
    for shape in SHAPES
    for kind in KINDS
    for tiles in (range(4) if shape[1] in (64, 130, 136) else [None])
}
CASES |= {
    f"in place {m}×{n}": (grams_in_place, {"m": m, "n": n})
    for m, n in ((64, 64), (136, 40), (201, 75))
}
CASES["elementwise"] = (elementwise, {})
BY_TORCH = {
    f"{kind} {shape}": (product, {"shape": shape, "kind": kind, "tiles": "torch"})
    for shape in ((0, 3, 4), (1, 1, 1), (2, 5, 7), (3, 16, 40), (2, 7, 7))
    for kind in KINDS
}
BY_TORCH["elementwise"] = (elementwise, {"by": "torch"})
