"""Muon, Pion and Leon against slow NumPy twins of the paper's algorithms, step for step."""

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


def run(optimizer, params, streams):
    for step in range(len(streams[0])):
        for param, stream in zip(params, streams, strict=True):
            param.grad = stream[step].clone()
        optimizer.step()


def twin_options(options):
    keys = {"nesterov": "nesterov", "weight_decay": "decay"}
    return {keys[k]: v for k, v in options.items() if k in keys}


def check(params, twins, streams, options):
    sign = -1 if options.get("maximize") else 1
    for param, twin, stream in zip(params, twins, streams, strict=True):
        factor = scale_factor(options.get("scale", "spectral"), *param.shape)
        for gradient in stream:
            twin.step(sign * gradient.numpy(), factor)
        # Both sides are backward stable; the totals of five Gaussian steps have condition < 1e4.
        np.testing.assert_allclose(param.detach().numpy(), twin.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_follows_algorithm_1(options):
    params = [torch.nn.Parameter(gradients(shape, 1, 9)[0]) for shape in SHAPES]
    streams = [gradients(shape, 5, i) for i, shape in enumerate(SHAPES)]
    twins = [MuonTwin(p.detach(), 0.1, 0.9, **twin_options(options)) for p in params]
    run(nucleon.Muon(params, lr=0.1, momentum=0.9, method="svd", **options), params, streams)
    check(params, twins, streams, options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "own",
    [{}, {"beta2": 0.5}, {"smoothing_scale": 3.0}, {"gradient_bound": 2.0}],
    ids=str,
)
def test_leon_follows_algorithm_3(options, own):
    params = [torch.nn.Parameter(gradients(shape, 1, 9)[0]) for shape in SHAPES]
    streams = [gradients(shape, 5, i) for i, shape in enumerate(SHAPES)]
    twins = [LeonTwin(p.detach(), 0.1, 0.9, **twin_options(options), **own) for p in params]
    run(nucleon.Leon(params, 0.1, momentum=0.9, method="eigh", **options, **own), params, streams)
    check(params, twins, streams, options)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("own", [{"smoothing_scale": "literal"}, {}, {"gradient_bound": 2.0}])
def test_pion_follows_algorithm_2(samples, own):
    """With the noise of the documented function, at the theory's scale and as printed."""
    shapes = [(3, 7), (4, 4), (7, 3)]
    params = [torch.nn.Parameter(gradients(shape, 1, 9)[0]) for shape in shapes]
    streams = [gradients(shape, 5, i) for i, shape in enumerate(shapes)]
    optimizer = nucleon.Pion(
        params, 0.1, momentum=0.9, samples=samples, method="svd", seed=7, **own
    )
    for index, (param, stream) in enumerate(zip(params, streams, strict=True)):
        m, n = sorted(param.shape)
        literal = own.get("smoothing_scale") == "literal"
        width = n if literal else max(n, 2 * m, m + 2)
        # β/α of Theorem 4.1 at the padded width
        c = 1.0 if literal else 1 / ((m**0.5 + width**0.5) * (width - m - 1) ** 0.5)
        twin = PionTwin(
            param.detach(), 0.1, 0.9, smoothing_scale=c, gradient_bound=own.get("gradient_bound", 0)
        )
        # GGᵀ of the first step is singular for square matrices only to rounding: well posed here.
        for step, gradient in enumerate(stream, start=1):
            twin.noise = [
                noise.normal(
                    (m, width),
                    seed=7,
                    stream=index << 20,
                    step=step,
                    sample=i,
                    dtype=torch.float64,
                ).numpy()
                for i in range(samples)
            ]
            twin.step(gradient.numpy(), scale_factor("spectral", *param.shape))
        expected = twin.w
        param.expected = expected
    run(optimizer, params, streams)
    for param in params:
        np.testing.assert_allclose(param.detach().numpy(), param.expected, rtol=0, atol=1e-9)
