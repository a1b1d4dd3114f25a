"""Muon, Pion and Leon against slow NumPy twins of the paper's algorithms, step for step."""

from functools import partial

import numpy as np
import pytest
import torch

import nucleon
from nucleon import noise
from nucleon.optim import scale_factor
from optim.twins import LeonTwin, MuonTwin, PionTwin

SHAPES = [(1, 1), (1, 6), (6, 1), (4, 4), (3, 7), (7, 3)]
OPTIONS = [
    {},
    {"nesterov": True},
    {"weight_decay": 0.3},
    {"scale": "match-adamw"},
    {"scale": "none", "maximize": True},
]


def gradients(shape, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def follow(make, twin_of, shapes, options, own, noise_of=None, atol=1e-10):
    """Take five steps of an optimizer and of a twin for each matrix, and compare the weights."""
    params = [torch.nn.Parameter(gradients(shape, 1, 9)[0]) for shape in shapes]
    streams = [gradients(shape, 5, i) for i, shape in enumerate(shapes)]
    keys = {"nesterov": "nesterov", "weight_decay": "decay"}
    given = {keys[k]: v for k, v in options.items() if k in keys}
    twins = [twin_of(p.detach(), 0.1, 0.9, **given) for p in params]
    optimizer = make(params, 0.1, momentum=0.9, **options, **own)
    sign = -1 if options.get("maximize") else 1
    for step in range(5):
        for index, (param, twin, stream) in enumerate(zip(params, twins, streams, strict=True)):
            param.grad = stream[step].clone()
            if noise_of is not None:
                twin.noise = noise_of(index, step + 1, param)
            factor = scale_factor(options.get("scale", "spectral"), *param.shape)
            twin.step(sign * stream[step].numpy(), factor)
        optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        # Both sides are backward stable; the totals of five Gaussian steps have condition < 1e4.
        np.testing.assert_allclose(param.detach().numpy(), twin.w, rtol=0, atol=atol)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_follows_algorithm_1(options):
    follow(nucleon.Muon, MuonTwin, SHAPES, options, {"method": "svd"})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "own", [{}, {"beta2": 0.5}, {"smoothing_scale": 3.0}, {"gradient_bound": 2.0}], ids=str
)
def test_leon_follows_algorithm_3(options, own):
    twin = partial(LeonTwin, **own)
    follow(nucleon.Leon, twin, SHAPES, options, own | {"method": "eigh"})


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("own", [{"smoothing_scale": "literal"}, {}, {"gradient_bound": 2.0}])
def test_pion_follows_algorithm_2(samples, own):
    """With the noise of the documented function, at the theory's scale and as printed."""
    literal = own.get("smoothing_scale") == "literal"

    def width(m, n):
        return n if literal else max(n, 2 * m, m + 2)

    def twin(weight, *rates):
        m, n = sorted(weight.shape)
        n = width(m, n)
        # β/α of Theorem 4.1 at the padded width
        c = 1.0 if literal else 1 / ((m**0.5 + n**0.5) * (n - m - 1) ** 0.5)
        bound = own.get("gradient_bound", 0)
        return PionTwin(weight, *rates, smoothing_scale=c, gradient_bound=bound)

    def noise_of(index, step, param):
        m, n = sorted(param.shape)
        drawn = {"seed": 7, "stream": index << 20, "step": step, "dtype": torch.float64}
        shape = (m, width(m, n))
        return [noise.normal(shape, sample=i, **drawn).numpy() for i in range(samples)]

    # GGᵀ of the first step is singular for square matrices only to rounding: well posed here.
    shapes, own = [(3, 7), (4, 4), (7, 3)], own | {"samples": samples, "method": "svd", "seed": 7}
    follow(nucleon.Pion, twin, shapes, {}, own, noise_of, atol=1e-9)
