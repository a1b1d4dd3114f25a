"""Devices that lack float64 and some kernels, as Apple's MPS, and GPUs without Triton, as ROCm's.

The CPU stands in for MPS: a mode refuses every float64 tensor and every operator that torch has no
MPS kernel of, unless their operands were brought to the CPU by `Tensor.cpu`.
"""

import importlib
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torchgen
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nucleon
from nucleon import _checks
from nucleon.linalg import kernels, nuclear_norm, operator_norm, polar, residual
from nucleon.optim import polar_methods
from optim import adamw_cases

METHODS = {"muon": nucleon.Muon, "pion": nucleon.Pion, "leon": nucleon.Leon}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
SHAPES = [(6, 9), (9, 6), (7, 7), (3, 4, 5), (1, 5), (1, 1)]

OPTIONS = {
    "defaults": {},
    "weight decay": {"weight_decay": 0.1},
    "nesterov": {"nesterov": True},
    "match-adamw": {"scale": "match-adamw"},
    "random lengths": {"step_length": "exponential"},
    "stochastic rounding": {"stochastic_rounding": True},
    "many iterations": {"iterations": 10},
    "maximize": {"maximize": True},
    "bf16 momentum": {"momentum_dtype": torch.bfloat16},
    "many stacks": {"largest_stack": 100},
    "certify": {"certify": True},
    "newton-schulz": {"method": "newton-schulz"},
}
OTHER_METHODS = [
    (nucleon.Muon, "svd"),
    (nucleon.Muon, "muon"),
    (nucleon.Muon, "half"),
    (nucleon.Pion, "svd"),
    (nucleon.Pion, "half"),
    (nucleon.Leon, "eigh"),
    (nucleon.Leon, "coupled"),
    (nucleon.Leon, "half"),
]


# ---------------------------------------------------------------- what the device would refuse


@cache
def declared():
    """Return, for each of torch's operators, its delegate and the devices of its kernels."""
    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    text = (folder / "native_functions.yaml").read_text(encoding="utf-8")
    found = {}
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, re.MULTILINE)
        keys = re.findall(r"^    ([A-Z][\w, ]*):", entry, re.MULTILINE)
        found[entry.split("(")[0]] = (delegate and delegate[1], ", ".join(keys).split(", "))
    return found


def runs_on_mps(name):
    delegate, keys = declared()[name]
    if delegate:
        return runs_on_mps(delegate)
    if keys == [""] or "MPS" in keys:
        return True
    out = f"{name}_out"  # what a composite operator of that name calls
    return any(k.startswith("Composite") for k in keys) and (
        out not in declared() or runs_on_mps(out)
    )


class Refuses(TorchDispatchMode):
    """Raise on a float64 tensor, and on an operator that has no kernel, as MPS would.

    `factories` make tensors of numbers, for which device one cannot see; where some of them are for
    the CPU they are left out.
    """

    def __init__(self, *, factories=True):
        super().__init__()
        self.factories = factories

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        made, given = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in (result, (args, kwargs))
        )
        made_of_numbers = all(x.ndim == 0 and x.dtype == torch.float64 for x in given)
        if any(hasattr(x, "on_the_cpu") for x in given):
            for x in made:
                x.on_the_cpu = True
            return result
        if made_of_numbers and not self.factories:
            return result
        if any(x.dtype == torch.float64 for x in made):
            raise TypeError(f"{operator} makes a float64 tensor, which MPS has not")
        namespace, name = operator.name().split("::")
        if namespace == "aten" and not runs_on_mps(name):
            raise NotImplementedError(f"{operator} has no kernel on MPS")
        return result


def brought(x):
    copy = x.clone()
    copy.on_the_cpu = True
    return copy


@pytest.fixture
def another_device(monkeypatch):
    """The CPU is taken for a device that lacks what MPS lacks."""
    monkeypatch.setattr(_checks, "COMPLETE", ())
    monkeypatch.setattr(torch.Tensor, "cpu", brought)


@pytest.fixture
def mps(another_device):
    with Refuses():
        yield


def test_the_mode_refuses(mps):
    x = torch.ones(3, 4)
    x @ x.mT
    for refused in (torch.frexp, lambda x: x.sum(dtype=torch.float64), torch.linalg.svdvals):
        with pytest.raises((TypeError, NotImplementedError), match="MPS"):
            refused(x)
    torch.linalg.svdvals(x.cpu().double())


# ---------------------------------------------------------------- nothing of a step is refused


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    return [torch.nn.Parameter(x) for x in drawn]


def train(optimizer, params, steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_step_needs_nothing_that_mps_lacks(make, dtype, options, mps):
    params = parameters(dtype=dtype)
    before = [p.detach().clone() for p in params]
    train(make(params, **options), params)
    for old, p in zip(before, params, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(old, p)


@pytest.mark.parametrize(("make", "method"), OTHER_METHODS)
def test_nor_do_the_methods_that_one_may_choose(make, method, mps):
    params = parameters()
    train(make(params, method=method), params)
    assert all(p.isfinite().all() for p in params)


def test_nor_does_adamw_for_the_rest_of_a_model(mps):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6), torch.nn.ReLU())
    optimizer = nucleon.Leon.for_model(model, aux_lr=torch.tensor(1e-2), weight_decay=0.1)
    assert {group["route"] for group in optimizer.param_groups} == {"matrix", "adamw"}
    train(optimizer, list(model.parameters()))
    assert all(p.isfinite().all() for p in model.parameters())


def test_what_is_asked_of_an_optimizer_needs_no_more(another_device):
    """Its diagnostics are computed there, its certificates on the CPU."""
    params = parameters()
    optimizer = nucleon.Leon(params, gradient_bound=10.0, certify=True)
    train(optimizer, params)
    with Refuses():
        assert all(map(math.isfinite, optimizer.diagnostics().values()))
    with Refuses(factories=False):
        certificates = optimizer.certificates()
    for certificate in certificates.values():
        assert certificate.regret.dtype == torch.float64


def test_norms_and_the_exact_polar_factor_are_computed_on_the_cpu(another_device):
    x = parameters([(4, 6)])[0].detach()
    with Refuses(factories=False):
        found, distance = polar(x), residual(polar(x), x)
        norms = operator_norm(x), nuclear_norm(x)
    assert found.dtype == x.dtype
    assert distance.item() <= 4 * 2.0**-24  # rounded once to float32, four rows
    values = torch.linalg.svdvals(x.double())
    for norm, value in zip(norms, (values.max(), values.sum()), strict=True):
        assert norm.item() == pytest.approx(value.item(), rel=1e-6)


# ---------------------------------------------------------------- and it computes the same


@pytest.mark.parametrize("options", [{}, {"method": "newton-schulz", "iterations": 20}], ids=str)
def test_the_directions_are_those_of_other_devices(options, another_device, monkeypatch):
    """Up to float32: a norm that is summed in it moves all of X by √mn·eps ≤ 9 eps at most."""
    found = []
    for complete in ((), ("cpu",)):
        monkeypatch.setattr(_checks, "COMPLETE", complete)
        params = parameters()
        train(nucleon.Leon(params, **options), params, steps=1)
        found.append(params)
    # The steps take the least singular value, √(32 eps) by the floor, to 1: 512 times itself, and
    # so its error. lr·scale ≤ 0.025, and W itself, |W| < 4, is rounded.
    eps = torch.finfo(torch.float32).eps
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 0.025 * 512 * 9 * eps + 4 * eps


def test_a_norm_whose_square_overflows(another_device):
    """In units of 2^k the direction is the same bit for bit, though its squares are not numbers."""
    directions = []
    for power in (0, 61, -40):
        weight = torch.nn.Parameter(torch.zeros(4, 40))
        optimizer = nucleon.Leon([weight], lr=1.0, scale="none")
        weight.grad = torch.ones(4, 40).cumsum(1).remainder(3).sub(1) * torch.eye(4, 40).add(1)
        weight.grad *= 2.0**power
        optimizer.step()
        directions.append(weight.detach())
    squares = 2 * directions[0].new_ones(160).mul(2.0**61).square().sum()
    assert squares.isinf()
    assert directions[0].any()
    assert torch.equal(directions[0], directions[1])
    assert torch.equal(directions[0], directions[2])


def test_adamw_keeps_its_digits(another_device):
    adamw_cases.digits(torch.device("cpu"))


# ---------------------------------------------------------------- ROCm


@pytest.mark.parametrize(("hip", "method"), [(None, "half"), ("6.4.1", "polar-express")])
@every_method
def test_a_rocm_build_takes_the_torch_iteration(make, hip, method, monkeypatch):
    """Its devices are called "cuda" and Triton may be there, but not for these kernels."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    importlib.import_module("torch._dynamo")  # which a fake tensor imports, by the real find_spec
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _: "found")
    kernels.triton_works.cache_clear()
    polar_methods.method_for.cache_clear()
    try:
        with FakeTensorMode():
            weight = torch.nn.Parameter(torch.zeros(128, 256, device="cuda"))
            told = make([("weight", weight)]).explain()
    finally:
        kernels.triton_works.cache_clear()
        polar_methods.method_for.cache_clear()
    found = told["weight"].optimizer
    assert found.partition(" ")[0] == f"{make.name}/{method}"
    assert ("(torch: no Triton)" in found) == (hip is not None)
    assert found in str(told)
