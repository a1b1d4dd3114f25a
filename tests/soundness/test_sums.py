"""The rounding of M̂ in thousands of steps, and below the normal numbers."""

import pytest
import torch

import nucleon
from nucleon import moments

METHODS = {"polar-express": 1e-3, "newton-schulz": 1e-3, "coupled": 1e-3, "bfloat16": 1e-2}
"""And by how much ‖P‖_op may exceed 1."""


def longest_direction(optimizer, weight, gradients) -> float:
    """The largest ‖P‖_op of steps with these gradients, none of which is skipped."""
    found = 0.0
    for gradient in gradients:
        with torch.no_grad():
            weight.zero_()
        weight.grad = gradient
        optimizer.step()
        assert weight.isfinite().all()
        found = max(found, torch.linalg.matrix_norm(weight.detach().double(), 2).max().item())
    assert not optimizer.state[weight]["skipped"].any()
    return found


@pytest.mark.parametrize(
    ("momentum", "beta2"), [(0.99, None), (0.999, None), (0.9, 0.999), (0.9, 0.9999)]
)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_gradient_for_ever(method, momentum, beta2):
    """Rounding to the same side every time leaves M̂ with eigenvalues far below −32 eps·‖M̂‖_F.

    ±g for as long as M̂ grows, and then beside it gradients h of every size in the other directions.
    """
    decay = momentum**2 if beta2 is None else beta2
    generator = torch.Generator().manual_seed(0)
    u, v, h = (torch.randn(60, *s, generator=generator) for s in ((6, 1), (1, 9), (6, 9)))
    g, h = u @ v, h * torch.logspace(-1, -9, 60)[:, None, None]
    weight = torch.nn.Parameter(torch.zeros(60, 6, 9))
    options = {"momentum": momentum, "beta2": beta2, "method": method}
    optimizer = nucleon.Leon([weight], lr=1.0, scale="none", **options)
    gram = optimizer.state[weight]["gram"]
    for _ in range(min(int(3 / (1 - decay)), 20_000)):  # what the steps would make of it
        gram = moments.accumulate_gram(gram, g, decay**0.5)
    optimizer.state[weight]["gram"].copy_(gram)
    least = torch.linalg.eigvalsh(gram.double())[:, 0] / gram.double().norm(dim=(1, 2))
    assert decay < 0.99 or least.min() < -32 * torch.finfo(torch.float32).eps
    found = longest_direction(optimizer, weight, [(-1) ** t * g + h for t in range(12)])
    assert found <= 1 + METHODS[method]


@pytest.mark.parametrize("beta2", [0.98, 0.999, 0.9999])
def test_the_same_gradient_for_ever_in_float16(beta2):
    """M̂ of one direction, and beside it a gradient in all others; without `raised` ‖P‖ is 1.2."""
    generator = torch.Generator().manual_seed(2)
    g = torch.outer(torch.randn(64, generator=generator), torch.randn(96, generator=generator))
    weight = torch.nn.Parameter(torch.zeros(64, 96))
    options = {"momentum": 0.9, "beta2": beta2, "method": "half"}
    optimizer = nucleon.Leon([weight], lr=1.0, scale="none", **options)
    gram = optimizer.state[weight]["gram"]
    for _ in range(min(int(8 / (1 - beta2)), 6000)):
        gram = moments.accumulate_gram(gram, g[None], beta2**0.5)
    optimizer.state[weight]["gram"].copy_(gram)
    found = longest_direction(optimizer, weight, [torch.randn(64, 96, generator=generator)])
    assert found <= 1 + 1e-2


@pytest.mark.parametrize("beta2", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("smoothing_scale", [1e10, 1e20, 1e36])
@pytest.mark.parametrize("method", METHODS)
def test_a_scale_does_not_enlarge_the_rounding_of_subnormal_moments(method, smoothing_scale, beta2):
    """M̂ falls faster than Ĝ: its entries are few smallest numbers, and c·M̂ outweighs ĜĜᵀ."""
    generator = torch.Generator().manual_seed(0)
    size = 10.0 ** -torch.linspace(2, 15, 60)[:, None, None]
    u, v = (torch.randn(60, *s, generator=generator) for s in ((5, 2), (2, 7)))
    weight = torch.nn.Parameter(torch.zeros(60, 5, 7))
    options = {"momentum": 0.99, "beta2": beta2, "method": method}
    optimizer = nucleon.Leon([weight], lr=1.0, scale="none", **options)
    weight.grad = u @ v * size
    optimizer.step()
    # Straight to where M̂ leaves the normal numbers; what is there cannot overflow with c.
    gram = optimizer.state[weight]["gram"]
    gram.mul_(2.0**-110 / gram.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None])
    optimizer.param_groups[0]["smoothing_scale"] = smoothing_scale
    faint = torch.zeros(60, 5, 7)
    faint[:, 0, 0] = 1e-38  # not zero, or the matrices would rest
    found = longest_direction(optimizer, weight, [faint] * (60 if beta2 < 0.9 else 90))
    assert found <= 1 + METHODS[method]
