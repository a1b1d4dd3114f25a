"""Pion's kernels on CUDA: the noise that it promises, Cholesky's factor, and the whole step."""

import pytest
import torch

import nucleon
from nucleon import noise
from nucleon.linalg.roots import cholesky_root
from nucleon.optim.engines.cuda import addresses, engine, perturbed
from nucleon.optim.engines.work import Draws

KINDS = {
    "one sample": {},
    "four": {"samples": 4},
    "literal": {"smoothing_scale": "literal"},
    "bounded": {"gradient_bound": 3.0, "nesterov": True},
}


def drawn(m, width, samples, streams, step, seed):
    here = torch.device("cuda")
    tables = [addresses.table([x.data_ptr()], here) for x in (streams, step)]
    return perturbed.drawn(Draws(seed, samples, width), *tables, m, len(streams), 0, len(streams))


@pytest.mark.parametrize(("m", "width"), [(64, 128), (65, 131), (896, 1792)])
def test_the_noise_is_that_of_the_torch_path(m, width):
    streams = torch.tensor([3, 2**40 + 1, 7], device="cuda")
    step = torch.tensor(2**33 + 5, device="cuda")
    found = drawn(m, width, 2, streams, step, seed=-11).view(3, 2, m, width)
    for sample in range(2):
        expected = noise.normal(
            (3, m, width), seed=-11, stream=streams, step=step, sample=sample, device="cuda"
        )
        assert torch.equal(found[:, sample], expected.half())


def direction(cls, gradients, dtype, **options):
    """P of the last step."""
    weight = torch.zeros(gradients[0].shape, device="cuda", dtype=dtype, requires_grad=True)
    optimizer = cls([weight], lr=1.0, momentum=0.9, scale="none", **options)
    for gradient in gradients:
        weight.detach().zero_()
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return -weight.detach().double(), optimizer


@pytest.mark.parametrize("shape", [(128, 700), (200, 200), (70, 300), (513, 96)], ids=str)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_step_is_near_that_in_float64(shape, options):
    """The error of five float16 steps, below that of Jordan's five (0.19 to 0.25, docs/kernels)."""
    generator = torch.Generator("cuda").manual_seed(2)
    gradients = [torch.randn(shape, generator=generator, device="cuda") for _ in range(4)]
    found, optimizer = direction(nucleon.Pion, gradients, torch.float32, **options)
    (work,) = optimizer._worklist.works
    assert work.engine is engine
    exact, _ = direction(nucleon.Pion, gradients, torch.float64, method="svd", **options)
    assert torch.dist(found, exact) <= 0.15 * exact.norm()
    assert torch.linalg.matrix_norm(found, 2) <= 1.01


@pytest.mark.parametrize("m", [64, 200, 896])
def test_the_root_is_cholesky_s(m, monkeypatch):
    """L times its scale in float16; the factor of a nearly singular Λ is not unique to rounding."""
    generator = torch.Generator("cuda").manual_seed(3)
    weight = torch.zeros(m, 3 * m, device="cuda", requires_grad=True)
    weight.grad = torch.randn(m, 3 * m, generator=generator, device="cuda")
    kept = []
    run = perturbed.cholesky

    def watched(program, table, x, scale, taken):
        kept.append((run(program, table, x, scale, taken), scale, program.hyper.smoothing))
        return kept[-1][0]

    monkeypatch.setattr(perturbed, "cholesky", watched)
    optimizer = nucleon.Pion([weight])
    optimizer.step()
    found, scale, smoothing = kept[0]
    expected, failed = cholesky_root(smoothing * optimizer.state[weight]["gram"])
    assert not failed.any()
    expected = scale[:, None, None].double() * expected.double()
    assert torch.dist(found.double(), expected) <= 2.0**-11 * expected.norm()
    assert not found.triu(1).any()


def test_a_large_stack_is_drawn_in_parts(monkeypatch):
    """Bit for bit: noise depends on the matrix, not on the part."""

    def trained():
        generator = torch.Generator("cuda").manual_seed(6)
        weight = torch.zeros(5, 64, 128, device="cuda", requires_grad=True)
        optimizer = nucleon.Pion([weight], samples=2)
        for _ in range(3):
            weight.grad = torch.randn(weight.shape, generator=generator, device="cuda")
            optimizer.step()
        return weight

    whole = trained()
    monkeypatch.setattr(perturbed, "ENTRIES", 4 * 64 * 128)
    assert torch.equal(whole, trained())
