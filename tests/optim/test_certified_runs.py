"""500 random runs: every certificate is what an oracle makes of the gradients and the actions."""

import math
import zlib

import numpy as np
import pytest
import torch

import nucleon
from optim import certificate_oracle
from optim.certificate_oracle import Measured, short_side_first

RUNS, EACH = 500, 50
LAYOUTS = {  # shape, axes, and how the matrices lie in it
    "wide": ((2, 4), None, lambda x: x[None]),
    "tall": ((5, 3), None, lambda x: x[None]),
    "number": ((1, 1), None, lambda x: x[None]),
    "stack": ((3, 2, 4), None, lambda x: x),
    "convolution": ((3, 2, 2, 2), "r c c c", lambda x: x.reshape(1, 3, 8)),
    "fused": ((6, 4), "(b=3 r) c", lambda x: x.reshape(3, 2, 4)),
}


def drawn_options(rng, optimizer):
    """Options of a group, which may have a theorem or not."""
    options = {
        "momentum": float(rng.choice([0.5, 0.9, 0.99])),
        "weight_decay": float(rng.choice([0.0, 0.1])),
        "step_length": str(rng.choice(["constant", "exponential"])),
        "maximize": bool(rng.random() < 0.2),
        "scale": str(rng.choice(["spectral", "none"])),
        "momentum_dtype": torch.bfloat16 if rng.random() < 0.2 else None,
    }
    if optimizer is not nucleon.Muon:
        options["gradient_bound"] = float(rng.choice([0.0, 0.3, 1.0, 3.0], p=[0.1, 0.3, 0.3, 0.3]))
    if optimizer is nucleon.Leon:
        options["smoothing_scale"] = float(
            rng.choice([0.0, 0.25, 1.0, 4.0], p=[0.1, 0.2, 0.5, 0.2])
        )
        options["method"] = str(rng.choice(["eigh", "auto"]))
    return options


def drawn_gradient(rng, shape, lean, sizes, dtype):
    """A gradient that leans one way, now and then large, zero, not finite, or none at all."""
    kind = rng.random()
    if kind < 0.1:
        return None
    g = rng.standard_normal(shape) * rng.choice(sizes) + lean
    g = np.zeros(shape) if kind < 0.2 else g
    if kind > 0.93:
        g[tuple(0 for _ in shape)] = rng.choice([math.nan, math.inf])
    return torch.from_numpy(g).to(dtype)


def played(seed, monkeypatch):
    """A random run: its optimizer, and for each parameter its layout, group and gradients."""
    rng = np.random.default_rng(seed)
    kinds = [nucleon.Leon, nucleon.Muon, nucleon.Pion]
    make = kinds[rng.choice(3, p=[0.8, 0.1, 0.1])]
    dtype = [torch.float32, torch.float64, torch.bfloat16][rng.integers(3)]
    groups, params, climbs = [], [], rng.random() < 0.3
    sizes = [0.01] if climbs else [0.05, 0.5, 0.5, 5.0]
    for index in range(rng.integers(1, 3)):
        layout = str(rng.choice([*LAYOUTS]))
        shape, axes, matrices = LAYOUTS[layout]
        own, lean = drawn_options(rng, make), rng.standard_normal(shape) * rng.choice([0.0, 0.5])
        if climbs:  # one way, with a norm just below gradient_bound
            lean = rng.standard_normal(shape)
            norm = np.linalg.norm(matrices(lean), 2, axis=(-2, -1)).max()
            lean *= 0.9 * own.get("gradient_bound", 1.0) / norm
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        params.append((param, layout, lean, []))
        groups.append({"params": [(f"w{index}", param)], "axes": axes, **own})
    optimizer = make(groups, lr=0.1, certify=True)
    steps = int(rng.integers(2, 7))
    with certificate_oracle.applied_directions(monkeypatch) as log:
        for step in range(steps):
            for group, (param, _, lean, rounds) in zip(optimizer.param_groups, params, strict=True):
                group["lr"] = 0.1 / (1 + step)
                gradient = drawn_gradient(rng, param.shape, lean, sizes, dtype)
                param.grad = gradient
                rounds += [] if gradient is None else [gradient.double().numpy()]
                if climbs:  # so that the regret exceeds its bound
                    total = optimizer.state[param]["total"]
                    sign = -1 if group["maximize"] else 1
                    total.copy_(torch.from_numpy(-20 * sign * lean).to(total))
            optimizer.step()
    return optimizer, params, log


def expected(optimizer, group, layout, gradients, directions):
    """Return the oracle's measurement of each matrix of a parameter."""
    _, _, matrices = LAYOUTS[layout]
    sign = -1.0 if group["maximize"] else 1.0
    cut = [short_side_first(matrices(sign * g)) for g in gradients]
    shape = matrices(np.zeros(LAYOUTS[layout][0])).shape[1:]
    m, n = sorted(shape)
    game = {"discount": group["momentum"], "gradient_bound": group.get("gradient_bound", 0.0)}
    game["smoothing"] = group.get("smoothing_scale", 0.0)
    if isinstance(optimizer, nucleon.Pion):  # Theorem 4.1 at the padded width
        width = max(n, 2 * m, m + 2)
        alpha, beta = math.sqrt(m) + math.sqrt(width), 1 / math.sqrt(width - m - 1)
        game |= {"alpha": alpha, "beta": beta, "smoothing": beta / alpha}
    for i in range(len(matrices(np.zeros(LAYOUTS[layout][0])))):
        rounds = [(g[i], p[i]) for g, p in zip(cut, directions, strict=True)]
        finite = [np.isfinite(g).all() for g, _ in rounds]
        assert finite == [np.isfinite(p).all() for _, p in rounds]  # the others are skipped
        rounds = [both for both, ok in zip(rounds, finite, strict=True) if ok]
        if not rounds:
            bound = math.inf if isinstance(optimizer, nucleon.Muon) else 0.0
            yield Measured(0.0, bound, 0.0, bound, 0.0)
        else:
            yield certificate_oracle.certified(*zip(*rounds, strict=True), **game)


@pytest.mark.filterwarnings("ignore:certify=True measures")
@pytest.mark.parametrize("batch", range(RUNS // EACH))
def test_certificates_are_the_oracles(batch, monkeypatch):
    held = broken = above = 0
    for seed in range(batch * EACH, (batch + 1) * EACH):
        optimizer, params, log = played(zlib.crc32(b"%d" % seed), monkeypatch)
        certificates = optimizer.certificates()
        for index, group in enumerate(optimizer.param_groups):
            param, layout, _, gradients = params[index]
            directions = log.get(param, [])
            certificate = certificates[f"w{index}"]
            oracle = [*expected(optimizer, group, layout, gradients, directions)]
            for i, found in enumerate(oracle):
                regret, bound = certificate.regret[i].item(), certificate.bound[i].item()
                assert abs(regret - found.regret) <= 1e-6 * found.scale, seed
                assert bound == pytest.approx(found.bound, rel=1e-6), seed
                assert bound >= found.sharp * (1 - 1e-12) or math.isinf(bound), seed
                assert certificate.largest[i].item() == pytest.approx(found.largest, rel=1e-6)
                above += certificate.excess[i].item() > 0
            exceeds = any(x.regret > x.bound * (1 + 1e-9) for x in oracle)
            assert not (certificate.holds and exceeds), seed
            held, broken = held + certificate.holds, broken + exceeds
    assert held > 5 and above > 5 and broken > 0  # the runs are not all of one kind
