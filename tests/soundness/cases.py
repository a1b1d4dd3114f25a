"""Cases of the promises of every step, for any run and device, through public names.

`tests/soundness` runs them on the CPU, `tests/gpu/test_gpu_cases.py` on a CUDA device. A case that
fails raises.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import nucleon
from soundness import oracle
from soundness.watch import Watched

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
METHODS = {
    nucleon.Muon: ("auto", "bfloat16", "newton-schulz", "muon", "svd", "half"),
    nucleon.Leon: ("auto", "bfloat16", "newton-schulz", "coupled", "eigh", "half"),
    nucleon.Pion: ("auto", "bfloat16", "newton-schulz", "svd"),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"nesterov": True},
    {"momentum": 0.5},
    {"momentum": 0.9},
    {"momentum": 0.99},
    {"momentum": 0.0},
    {"momentum_dtype": torch.bfloat16},
    {"momentum": 0.9, "beta2": 0.99},
    {"momentum": 0.9, "beta2": 0.5},
    {"smoothing_scale": 4.0},
    {"smoothing_scale": 0.0},
    {"gradient_bound": 0.5},
)
OF_THE_GRAM = {"beta2", "smoothing_scale", "gradient_bound"}
FULL_STEPS = {0.0: 0, 0.5: 1, 0.9: 9, 0.95: 19, 0.99: 99, 0.999: 999}
"""β₁: quiet steps of full length, int(1/ln(1/β₁))."""


@dataclass(frozen=True)
class Setting:
    """An optimizer with its options, a dtype and a device."""

    make: Callable[..., torch.optim.Optimizer]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in self.options.items())
        return f"{self.make.__name__}({given}) {str(self.dtype).removeprefix('torch.')}"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Wide, tall and a stack; large enough for the float16 recursion where it is used.

        On CUDA also below 64 rows, which have kernels of their own.
        """
        if self.device != "cpu":
            large = [(64, 96), (128, 256), (96, 64), (3, 64, 80)]
            return large if self.options.get("method") == "half" else [*large, (6, 8), (2, 7, 5)]
        if self.options.get("method") == "half":
            return [(64, 96)]
        return [(6, 8), (8, 5), (2, 5, 7)]

    @property
    def has_gram(self) -> bool:
        return self.make is not nucleon.Muon

    def watched(self, shapes=None, **more: Any) -> Watched:
        """A watched optimizer of this setting."""
        given = {**self.options, **more}
        return Watched(self.make, shapes or self.shapes, self.dtype, self.device, **given)

    def parameters(self, shapes=None) -> list[torch.nn.Parameter]:
        """Gaussian weights, the same every time."""
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(s, generator=generator) for s in shapes or self.shapes]
        return [torch.nn.Parameter(w.to(self.device, self.dtype)) for w in drawn]


def settings(device: str, *, dtypes=DTYPES, options=OPTIONS) -> Iterator[Setting]:
    """Every optimizer × method × dtype × options that it has."""
    for make, methods in METHODS.items():
        for method in methods:
            for given in options:
                if make is nucleon.Muon and OF_THE_GRAM & set(given):
                    continue
                for dtype in dtypes:
                    yield Setting(make, dtype, device, {"method": method, **given})


def some_settings(device: str, **which) -> list[Setting]:
    """Each optimizer × method × dtype once, with options in turn."""
    by_kind: dict[object, list[Setting]] = {}
    for s in settings(device, **which):
        by_kind.setdefault((s.make, s.options["method"], s.dtype), []).append(s)
    return [found[(5 * i) % len(found)] for i, found in enumerate(by_kind.values())]


def drawn(watched: Watched, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    """Gaussian gradients of this scale, in float64: rounded to the parameters' dtype later."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [p.shape for p in watched.params]
    return [torch.randn(s, generator=generator, dtype=torch.float64) * scale for s in shapes]


# ---------------------------------------------------------------- without gradients


def small(setting: Setting) -> float:
    """A scale of gradients from which moments fade soon, in the range of the dtype and method."""
    narrow = setting.options.get("method") == "half" or "momentum_dtype" in setting.options
    if setting.dtype == torch.float64 and not narrow:
        return 3e-146
    return 1e-3 if setting.dtype == torch.float16 else 1e-15


def check_quiet_run(setting: Setting, steps: int, scale: float, shapes=None) -> Watched:
    """Three gradients, then none, then one: judged at both ends and where the matrices rest.

    Without `gradient_bound` and with β₂ = β₁² the quiet steps have the length of the first one
    until the matrix rests, and none after that.
    """
    watched = setting.watched(shapes)
    momentum = watched.group["momentum"]
    for seed in range(3):
        watched.step(*drawn(watched, seed, scale))
    full = oracle.quiet_steps(momentum)
    watched.quiet(3)
    watched.quiet_unjudged(int(min(full, steps)) - 4)
    watched.quiet(3)
    watched.quiet_unjudged(steps - watched.steps)
    watched.quiet(2)
    settles = setting.make is nucleon.Leon and "gradient_bound" in setting.options
    if "beta2" not in setting.options and not settles and full < steps:
        moving = torch.tensor(watched.lengths[3:]) > 0
        assert moving[: int(full)].all() and not moving[int(full) :].any(), moving.sum(0)
    watched.step(*drawn(watched, 3, scale))
    return watched


def check_rest(setting: Setting, momentum: float) -> Watched:
    """After its last gradient a matrix takes int(1/ln(1/β₁)) steps of full length, then none."""
    full = FULL_STEPS[momentum]
    watched = setting.watched(setting.shapes[:1], momentum=momentum)
    for seed in range(2):
        watched.step(*drawn(watched, seed))
    judged = min(full, 4)
    watched.quiet(judged)
    watched.quiet_unjudged(full - judged)
    assert all(min(lengths) > 0.3 for lengths in watched.lengths[2:]), "not of full length"
    watched.quiet(3)
    assert not any(map(max, watched.lengths[-3:])), "moved while at rest"
    return watched


def check_decay(setting: Setting) -> Watched:
    """With a large `gradient_bound` the direction falls as β₁ᵏ, and nothing rests."""
    watched = setting.watched(gradient_bound=1e3, momentum=0.9)
    watched.step(*drawn(watched, 0))
    watched.quiet(60)
    first, *later = watched.lengths
    limits = torch.finfo(setting.dtype)
    # On CUDA "auto" is the float16 recursion, right to 1e-2.
    half = 1e-2 if setting.device != "cpu" and setting.dtype != torch.float64 else 0.0
    for k, lengths in enumerate(later, start=1):
        for a, b in zip(first, lengths, strict=True):
            # Λ falls from c(G²β₁⁻² + ‖g‖²) to its first term, by a share ‖g‖²/G² < 1e-3 here.
            rounded = limits.eps * a * 0.9**k + 20 * limits.smallest_normal * limits.eps
            allowed = (2e-3 + half) * a * 0.9**k + rounded
            assert abs(b - a * 0.9**k) <= allowed, (k, b, a * 0.9**k)
    return watched


# ---------------------------------------------------------------- scales


def exponents(setting: Setting) -> tuple[int, int]:
    """Return exponents of ten: the ends of the gradients; "half" has float32's range."""
    if setting.dtype == torch.float64 and setting.options.get("method") == "half":
        return -12, 16
    ends = {torch.float16: (-8, 4), torch.bfloat16: (-41, 37), torch.float64: (-320, 300)}
    return ends.get(setting.dtype, (-45, 37))


def check_scales(setting: Setting, kind: str, steps: int = 6, count: int = 12) -> Watched:
    """A stack with one matrix per scale: "steady", "alternating" with its mirror, or "mixed"."""
    low, high = exponents(setting)
    side = setting.shapes[0]
    count = count if side[0] < 64 else min(count, 8)  # the oracle takes its time
    scales = torch.linspace(low, high, count, dtype=torch.float64)
    watched = setting.watched([(count, *side)])
    generator = torch.Generator().manual_seed(count)
    for step in range(steps):
        here = scales
        if kind == "alternating" and step % 2:
            here = scales.flip(0)
        if kind == "mixed":
            here = low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)
        gradient = torch.randn(watched.params[0].shape, generator=generator, dtype=torch.float64)
        gradient = gradient.clamp(-3, 3) * 10.0 ** here[:, None, None]
        watched.step(gradient)
    watched.quiet(2)
    return watched


# ---------------------------------------------------------------- experts


class Experts(torch.nn.Module):
    """Two experts behind a fixed choice; the second gets no rows after a while."""

    def __init__(self, width: int):
        super().__init__()
        make = torch.nn.Linear
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(make(width, 2 * width), torch.nn.Tanh(), make(2 * width, width))
            for _ in range(2)
        )
        self.out = make(width, 1)

    def forward(self, x: torch.Tensor, rows: list[int], *, missing: bool) -> torch.Tensor:
        found = [
            e(part)
            for e, part in zip(self.experts, x.split(rows), strict=True)
            if len(part) or not missing
        ]
        return self.out(torch.cat(found))


def check_expert(setting: Setting, *, missing: bool, steps: int = 1000) -> None:
    """Its weights stay finite, move on by lr·scale for 1/ln(1/β₁) steps, and then stop."""
    width = 64 if setting.device != "cpu" else 6
    torch.manual_seed(0)
    model = Experts(width).to(setting.device, setting.dtype)
    optimizer = setting.make.for_model(model, lr=0.01, **setting.options)
    generator = torch.Generator().manual_seed(2)
    idle, start = model.experts[1], {}
    full = int(oracle.quiet_steps(setting.options.get("momentum", 0.95)))
    for step in range(20 + steps):
        x = torch.randn(8, width, generator=generator).to(setting.device, setting.dtype)
        optimizer.zero_grad()
        loss = model(x, [4, 4] if step < 20 else [8, 0], missing=missing).float().square().mean()
        loss.backward()
        if step == 20:
            assert all((p.grad is None) == missing for p in idle.parameters())
            start = {n: p.detach().clone() for n, p in idle.named_parameters()}
        optimizer.step()
        if step == 20 + full:
            rested = {n: p.detach().clone() for n, p in idle.named_parameters() if p.ndim == 2}
    assert all(p.isfinite().all() for p in model.parameters())
    for name, p in idle.named_parameters():
        if missing:
            assert torch.equal(p, start[name]), name
        elif p.ndim == 2:
            assert torch.equal(p, rested[name]), f"{name} moves while it rests"
            moved = torch.linalg.matrix_norm((p - start[name]).double(), 2).item()
            most = full * 0.01 * math.sqrt(max(1, p.shape[0] / p.shape[1]))
            rounding = full * torch.finfo(setting.dtype).eps * p.double().norm().item()
            assert 0 < moved <= most * 1.01 + rounding, (name, moved, most)
