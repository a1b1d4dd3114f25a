"""The half-precision recursions on CUDA: right, synchronization-free, chosen where they pay."""

import pytest
import torch

pytest.importorskip("triton")

import half_contract
from helpers_half import CASES, LAMBDAS
from nucleon.linalg import coefficients, kernels
from nucleon.linalg.half import half_augmented, half_polar

SEQUENCE = coefficients.half_polar_express(5)
F32 = torch.float32


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
