"""The Triton kernels and the half-precision recursions on CUDA: right, synchronization-free."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers, however the folder is collected

import half_contract
import nucleon
from helpers_half import CASES, LAMBDAS, check_grams_in_place
from nucleon.linalg import coefficients, kernels
from nucleon.linalg.half import half_augmented, half_polar
from nucleon.optim.polar_methods import chosen_method

triton_symmetric = pytest.importorskip("nucleon.linalg.triton_symmetric")
CONFIGS = triton_symmetric.CONFIGS
SEQUENCE = coefficients.half_polar_express(5)
F32 = torch.float32
# 256-wide rows go through the copy engine, 147-wide ones cannot; 130, 200 and 5 leave ragged tiles,
# and a product of 300 rows is stored without the engine, which its operands go through.
SHAPES = [(2, 5, 7), (3, 130, 147), (2, 256, 256), (2, 200, 512), (2, 128, 136), (2, 300, 64)]
KINDS = ("", "remainder", "shifted")
HALF = [(torch.float16, shape, kind) for shape in SHAPES for kind in KINDS]
OTHERS = [(torch.bfloat16, SHAPES[3], ""), (F32, SHAPES[1], ""), (F32, SHAPES[3], "shifted")]


@pytest.mark.parametrize(("dtype", "shape", "kind"), HALF + OTHERS, ids=str)
def test_the_kernel_is_its_equation(dtype, shape, kind):
    count, m, depth = shape
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    # A ≠ B with a symmetric ABᵀ: a polynomial of a symmetric matrix and that, or BR and B.
    r = torch.randn(count, depth, depth, generator=generator, device="cuda") / depth**0.5
    r = (r + r.mT) / 2
    a, b = (x, x) if kind == "shifted" else (r @ r - r, r) if m == depth else (x.float() @ r, x)
    a, b = a.to(dtype), b.to(dtype)
    c = torch.randn(count, m, m, generator=generator, device="cuda")
    c, scale = c + c.mT, torch.rand(count, generator=generator, device="cuda") + 0.5
    addend = {"": None, "remainder": c, "shifted": c.to(dtype)}[kind]
    out = torch.full((count, m, m), torch.nan, dtype=dtype, device="cuda")
    second = torch.full_like(out, torch.nan)
    # Every shape with other tiles; float32 has small ones only, and a remainder large ones.
    config = CONFIGS[-1] if dtype == F32 else CONFIGS[SHAPES.index(shape) % len(CONFIGS)]
    config = triton_symmetric.LARGE if kind == "remainder" else config
    rest = ([0.5, 2.0, 0.25, 3.0], [1, 2], "ieee", kind, kernels.REMAINDER_SCALE)
    triton_symmetric.symmetric(a, b, addend, scale, out, second, *rest, config)
    left, right, s = a.double(), b.double(), scale.double()[:, None, None]
    plus = 0.0 if addend is None else 2 * s**2 * addend.double()
    eye = torch.eye(m, device="cuda", dtype=torch.float64)
    expected = 0.5 * s * left @ right.mT + plus + 0.25 * eye
    expected = expected.tril() + expected.tril(-1).mT  # rounded operands commute nearly
    # One rounding to the dtype after float32 sums of `depth` products, against the sizes summed.
    sizes = 0.5 * s * left.abs() @ right.abs().mT + abs(plus) + 4
    sizes = sizes.tril() + sizes.tril(-1).mT
    sums, eps = depth * 2**-24 * sizes, torch.finfo(dtype).eps
    assert torch.equal(out, out.mT)
    assert ((out - expected).abs() <= eps * sizes + sums).all()
    if kind == "shifted":
        assert ((second - expected - 3 * eye).abs() <= eps * sizes + sums).all()
    if kind == "remainder":
        whole = out.double() + second.double() / kernels.REMAINDER_SCALE
        assert ((whole - expected).abs() <= eps**2 * sizes + sums).all()


@pytest.mark.parametrize("shape", [(136, 64), (201, 75)], ids=str)
def test_gram_matrices_in_place(shape):
    check_grams_in_place(*shape, triton_symmetric.IN_PLACE, "cuda")


def test_what_a_kernel_would_read_out_of_bounds_is_refused_by_name():
    a = torch.zeros(2, 8, 16, device="cuda", dtype=torch.float16)
    for name, given, error in (
        ("a", [a[0], a[0]], ValueError),
        ("a", [a.double(), a.double()], TypeError),
        ("b", [a, a[:1]], ValueError),
        ("addend", [a, a, torch.zeros(8, 8, device="cuda")], ValueError),
    ):
        with pytest.raises(error, match=f"^{name} must"):
            kernels.symmetric_product(*given)


def test_a_remainder_holds_though_the_sums_are_long():
    """The matrix units truncate each partial sum: an addend among them would lose eleven bits."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(2, 128, 2**16, generator=generator, device="cuda").half() / 640
    root = torch.randn(2, 128, 100, generator=generator, device="cuda")
    addend = 40 * root @ root.mT  # 10⁴ times as large as XXᵀ
    value, rest = kernels.symmetric_pair(x, x, addend)
    whole = value.double() + rest.double() / kernels.REMAINDER_SCALE
    exact = x.double() @ x.double().mT + addend.double()
    assert (whole - exact).abs().max() <= 2**-20 * exact.abs().max()


@pytest.mark.parametrize(
    ("precision", "close"), [("tf32", 2**-9), ("tf32x3", 2**-18), ("ieee", 2**-20)]
)
def test_gram_of_float32(precision, close):
    a, c = torch.randn(2, 130, 300, device="cuda"), torch.zeros(2, 130, 130, device="cuda")
    out = kernels.symmetric_product(a, a, c, beta=0.5, precision=precision)
    exact = a.double() @ a.double().mT
    assert torch.equal(out, out.mT)
    assert ((out - exact).norm() / exact.norm()).item() <= close


WAYS = [half_contract.bare, half_contract.stepped]  # the latter by the fused kernels


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", LAMBDAS)
def test_half_precision_keeps_its_promises(kind, way):
    for name in CASES:
        for shape in ((64, 200), (136, 136)):
            for label, *figures in half_contract.judged(name, kind, *shape, 0, "cuda", way):
                assert half_contract.kept(*figures), (label, figures)


@pytest.mark.parametrize("shape", [(3, 128, 128), (2, 128, 512)], ids=str)
def test_no_synchronization_and_graphs(shape):
    s = torch.randn(shape, device="cuda")
    smoothing = s @ s.mT

    def both():
        return half_polar(s, SEQUENCE), half_augmented(s, smoothing, SEQUENCE)

    expected = both()  # tunes
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    graph.replay()
    for p, q in zip(captured, expected, strict=True):
        assert torch.equal(p, q)


def test_auto_chooses_float16_where_it_pays():
    cuda = torch.device("cuda")
    group = {"method": "auto", "iterations": 5}
    assert chosen_method(group, 768, 3072, cuda, F32) == "half"
    assert chosen_method(group, 768, 3072, cuda, torch.bfloat16) == "half"
    assert chosen_method(group, 16, 3072, cuda, F32) == "polar-express"
    assert chosen_method(group, 768, 3072, cuda, torch.float64) == "polar-express"
    for others in (4, 6, 9):
        assert chosen_method({**group, "iterations": others}, 768, 768, cuda, F32) != "half"
    assert chosen_method({**group, "method": "svd"}, 768, 768, cuda, F32) == "svd"


@pytest.mark.parametrize("cls", [nucleon.Muon, nucleon.Leon, nucleon.Pion])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16], ids=str)
def test_a_step_in_half_precision_is_near_the_float32_one(cls, dtype):
    weights = []
    for method in ("auto", "polar-express"):
        param = torch.zeros(96, 320, device="cuda", dtype=dtype, requires_grad=True)
        optimizer = cls([param], lr=1.0, method=method)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            param.grad = torch.randn(96, 320, generator=generator).to(param)
            optimizer.step()
        weights.append(param.detach().float())
    # Both are within two or three percent of the exact directions.
    assert torch.dist(*weights) <= 0.08 * weights[1].norm()
