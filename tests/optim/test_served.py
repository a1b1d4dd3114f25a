"""Which parameters the CUDA kernels leave to torch, and why: the list of what remains.

Tensors without memory stand for those of a GPU; `tests/gpu/test_gpu_cases.py` takes steps.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nucleon
from nucleon.optim import MatrixOptimizer, of_potential, polar_methods
from nucleon.optim.engines.cuda import engine
from nucleon.optim.muon import polar_direction

pytest.importorskip("triton")


class Hooked(nucleon.Leon):
    """A direction of the user's own, with which the kernel of Leon is not inherited."""

    def direction(self, total, smoothing, context):
        return super().direction(total, smoothing, context) / 2


class Bare(MatrixOptimizer):
    """A kernel, and no option `method`."""

    name = "bare"

    @of_potential(kernel="polar")
    def direction(self, total, smoothing, context):
        return polar_direction(total, context.options)


class Gram(Bare):
    """M̂, which is no operand of its kernel."""

    has_gram = True


HALF, WIDE = torch.bfloat16, torch.float64
REMAINING = {
    "certified": (nucleon.Leon, (64, 80), {}, {"certify": True}, "certify=True"),
    "float64": (nucleon.Leon, (64, 80), {"dtype": WIDE}, {}, "float64 weights"),
    "wide momentum": (nucleon.Muon, (64, 80), {}, {"momentum_dtype": WIDE}, "momentum_dtype"),
    "a method": (nucleon.Leon, (64, 80), {}, {"method": "eigh"}, "method='eigh' for 64×80"),
    "iterations": (nucleon.Leon, (64, 80), {}, {"iterations": 6}, "method='polar-express' for 64×"),
    "a small method": (nucleon.Muon, (6, 8), {}, {"method": "svd"}, "method='svd' for 6×8"),
    "coefficients": (
        *(nucleon.Muon, (64, 80), {}, {"coefficients": [(1.5, -0.5, 0.0)]}),
        "method='coefficients' for 64×80",
    ),
    "2³¹ entries": (nucleon.Leon, (2**16, 2**15), {}, {}, "method='polar-express' for 32768×"),
    "too long": (nucleon.Leon, (8, 2**16 + 1), {}, {}, "8×65537 is too long"),
    "small and half": (nucleon.Leon, (8, 80), {}, {"momentum_dtype": HALF}, "momentum_dtype=bf"),
    "long sums": (nucleon.Leon, (64, 80), {}, {"beta2": 0.99}, "beta2 above 0.984"),
    "axes": (nucleon.Leon, (2, 3, 2, 5, 2, 7), {}, {"axes": "r b r b r c"}, "its entries are not"),
    "a small Pion": (nucleon.Pion, (40, 80), {}, {}, "pion by 'polar-express' for 40×80"),
    "a hook": (Hooked, (64, 80), {}, {}, "leon has no kernel"),
    "a Gram too many": (Gram, (64, 80), {}, {}, "bare has no kernel"),
    "float64 vectors": (nucleon.Leon, (5,), {"dtype": WIDE}, {"route": "adamw"}, "float64 weights"),
    "complex": (nucleon.Leon, (5,), {"dtype": torch.cfloat}, {"route": "adamw"}, "complex64 weig"),
}


def method_of(make, param, options):
    (row,) = make([{"params": [param], **options}]).explain()
    return row.optimizer


@pytest.fixture(autouse=True)
def _no_memory(monkeypatch):
    for module in (engine, polar_methods):
        monkeypatch.setattr(module, "triton_works", lambda: True)
    polar_methods.method_for.cache_clear()
    with FakeTensorMode():
        yield
    polar_methods.method_for.cache_clear()


@pytest.mark.parametrize("case", REMAINING)
def test_what_is_not_served_says_why(case):
    make, shape, kind, options, expected = REMAINING[case]
    param = torch.empty(shape, device="cuda", **kind).requires_grad_()
    assert f"(torch: {expected}" in method_of(make, param, options)


@pytest.mark.parametrize("route", ["matrix", "adamw"])
def test_gaps_in_memory(route):
    param = torch.empty_strided((64, 80), (160, 1), device="cuda").requires_grad_()
    assert "(torch: its memory has gaps)" in method_of(nucleon.Leon, param, {"route": route})


def test_without_triton(monkeypatch):
    monkeypatch.setattr(engine, "triton_works", lambda: False)
    for route in ("matrix", "adamw"):
        param = torch.empty(64, 80, device="cuda").requires_grad_()
        assert "(torch: no Triton)" in method_of(nucleon.Leon, param, {"route": route})


@pytest.mark.parametrize("make", [nucleon.Muon, nucleon.Leon, nucleon.Pion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 80), (4, 96, 64), (80, 64)])
def test_the_rest_is_served(make, dtype, shape):
    param = torch.empty(shape, device="cuda", dtype=dtype).requires_grad_()
    assert "torch:" not in method_of(make, param, {})
    assert method_of(make, param, {"route": "adamw"}) == "adamw"


def test_a_method_without_the_option_method_is_served_as_by_auto():
    param = torch.empty(64, 80, device="cuda").requires_grad_()
    assert method_of(Bare, param, {}) == "bare/half"


def test_more_samples_than_fit_are_drawn_one_by_one():
    param = torch.empty(4096, 4096, device="cuda").requires_grad_()
    assert "torch:" not in method_of(nucleon.Pion, param, {"samples": 32})
    said = method_of(nucleon.Pion, param, {"samples": 33})
    assert "(torch: 33 samples of 4096×8192 at once)" in said
