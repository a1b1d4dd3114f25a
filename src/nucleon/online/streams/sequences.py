"""The gradient sequences that come with the package, one function each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Unpack

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.linalg.norms import operator_norm
from nucleon.online.streams.setting import (
    ROUNDING,
    TAIL,
    Setting,
    Shape,
    Stream,
    StreamOptions,
    clipped,
    gaussian_scale,
    oriented,
)
from nucleon.online.streams.worst_case import worst


def alternating(
    shape: Shape, *, rank: int | None = None, **options: Unpack[StreamOptions]
) -> Stream:
    """½E, then −E, +E, −E, …: the total is ±½E, and a learner that follows it is always wrong.

    E has `rank` (default min(m, n)) singular values equal to the bound, the others 0: the leading
    ones of the identity, or, when a seed is given, in random bases.
    """
    s = Setting(shape, **options)
    direction = s.isometry(_rank(s.short if rank is None else rank, s))

    def unit(t: int, action: Tensor | None) -> Tensor:
        return direction * (0.5 if t == 1 else (-1.0) ** (t - 1))

    return s.stream("alternating", unit, exact=s.seed is None)


def gaussian(shape: Shape, **options: Unpack[StreamOptions]) -> Stream:
    """Independent normal entries of deviation G/(√m + √n + 3).

    The few matrices whose norm exceeds the bound, at most 12 in 1000, are scaled back to it.
    """
    s = Setting(shape, **options)
    return s.stream("gaussian", lambda t, _: s.gaussian(t))


def low_rank(shape: Shape, *, rank: int = 1, **options: Unpack[StreamOptions]) -> Stream:
    """U Z_t Vᵀ, Z_t Gaussian of side `rank` (default 1): all share one row and one column space.

    U and V have orthonormal columns, drawn once; Z_t is scaled and clipped as in `gaussian`.
    """
    s = Setting(shape, **options)
    rank = _rank(rank, s)
    left, right = s.orthonormal(s.short, rank, 0), s.orthonormal(s.long, rank, 1)
    return s.stream("low-rank", lambda t, _: left @ s.gaussian(t, rank, rank) @ right.mT)


def ill_conditioned(
    shape: Shape, *, condition: float = 1e3, **options: Unpack[StreamOptions]
) -> Stream:
    """U diag(σ) Z_t, Z_t Gaussian, σ geometric from 1 to 1/condition (default 1000), U fixed.

    U is a random basis of the shorter side, on which E[G_tG_tᵀ] has the condition number
    condition². Entries have the deviation G/(√n + ‖σ‖ + 3) times σ, and larger norms are clipped.
    """
    s = Setting(shape, **options)
    condition = _checks.positive("condition", condition)
    decay = torch.linspace(0, -1, s.short, dtype=torch.float64, device=s.device)
    basis, spectrum = s.orthonormal(s.short, s.short, 0), (condition**decay).unsqueeze(-1)
    # E‖diag(σ)Z‖_op ≤ √n·max σ + ‖σ‖ (Chevet)
    scale = spectrum / (math.sqrt(s.long) + spectrum.norm() + TAIL)

    def unit(t: int, action: Tensor | None) -> Tensor:
        return basis @ clipped(scale * s.draw(noise.normal, t))

    return s.stream("ill-conditioned", unit)


def drifting(
    shape: Shape,
    *,
    period: float = 1000.0,
    noise_level: float = 0.5,
    **options: Unpack[StreamOptions],
) -> Stream:
    """−(1−ν)·Q_t + ν·N_t: the best action is a partial isometry Q_t that turns with the rounds.

    Q_t = U [I 0] R_t Wᵀ, where R_t turns pairs of coordinates of the longer side by 2πt/period (one
    without a partner is multiplied by the cosine), and N_t is the gradient of `gaussian`.
    `period` is in rounds (default 1000); `noise_level` is ν in [0, 1] (default ½).
    """
    s = Setting(shape, **options)
    period = _checks.positive("period", period)
    level = _checks.fraction("noise_level", noise_level, closed="01")
    left, right = s.orthonormal(s.short, s.short, 0), s.orthonormal(s.long, s.long, 1)
    start, quarter = left @ s.identity() @ right.mT, left @ s.quarter_turn() @ right.mT

    def unit(t: int, action: Tensor | None) -> Tensor:
        phase = 2 * math.pi * math.fmod(t, period) / period
        target = math.cos(phase) * start + math.sin(phase) * quarter
        return level * s.gaussian(t) - (1 - level) * target

    return s.stream("drifting", unit)


def sparse(shape: Shape, *, density: float = 0.1, **options: Unpack[StreamOptions]) -> Stream:
    """Normal entries, each kept with probability `density` in (0, 1] (default 0.1), the rest 0.

    Their deviation is G/(√density·(√m + √n) + 3); larger norms are scaled back to the bound.
    """
    s = Setting(shape, **options)
    density = _checks.fraction("density", density, closed="1")
    scale = 1 / (math.sqrt(density) * (math.sqrt(s.short) + math.sqrt(s.long)) + TAIL)

    def unit(t: int, action: Tensor | None) -> Tensor:
        nonzero = s.draw(noise.uniform, t) <= density
        return clipped(s.draw(noise.normal, t) * nonzero * scale)

    return s.stream("sparse", unit)


def heavy_tailed(shape: Shape, *, degrees: float = 2.0, **options: Unpack[StreamOptions]) -> Stream:
    """Independent Student t entries with `degrees` of freedom > 0 (default 2), clipped in norm.

    Entries are scaled as in `gaussian`, and a matrix whose norm then exceeds the bound is scaled
    back to it. An entry is √(ν(u^(−2/ν) − 1))·cos θ, u and θ uniform (Bailey 1994).
    """
    s = Setting(shape, **options)
    degrees = _checks.positive("degrees", degrees)
    scale = gaussian_scale(s.short, s.long)

    def unit(t: int, action: Tensor | None) -> Tensor:
        # e^80 is far into the clipped tail for every ν, and its Gram does not overflow.
        exponent = (s.draw(noise.exponential, t) * (2 / degrees)).clamp(max=80.0)  # −(2/ν) ln u
        radius = exponent.expm1().mul(degrees).sqrt()
        angle = s.draw(noise.uniform, t) * (2 * math.pi)
        return clipped(radius * angle.cos() * scale)

    return s.stream("heavy-tailed", unit)


def adversary(
    shape: Shape,
    *,
    kind: Literal["greedy", "orthogonal"] = "greedy",
    **options: Unpack[StreamOptions],
) -> Stream:
    """Adaptive: answers the action X_t = U Σ Vᵀ that it sees with G·U[I 0]Vᵀ, the worst gradient.

    "greedy" (default) answers G·U[I 0]Vᵀ = argmax ⟨·, X_t⟩, a loss of G‖X_t‖_* in every round: a
    learner whose action does not shrink has linear regret, as FTL and FTPL with k samples.
    "orthogonal" answers G·U J Vᵀ, J the quarter turn of `drifting`: the loss is 0 and the total
    grows across the action, so the comparator is strong. Where n ≥ 2m, a learner that plays along
    the total has regret D‖S_T‖_* = D·G·m√T, the order of the bounds.
    The answer to X_t = 0 is the partial identity, or, when a seed is given, a random isometry.
    """
    s = Setting(shape, **options)
    _checks.choice("kind", kind, ("greedy", "orthogonal"))
    turn = s.identity() if kind == "greedy" else s.quarter_turn()
    opening = s.isometry(s.short)

    def unit(t: int, action: Tensor | None) -> Tensor:
        x = _checks.matrix("action", action)
        if tuple(x.shape) != s.shape:
            raise ValueError(
                f"action must have the shape {s.shape} of the stream, got {tuple(x.shape)}"
            )
        x = oriented(x.to(s.device, torch.float64), s.shape).reshape(-1, s.short, s.long)
        u, _, vh = torch.linalg.svd(x)
        is_zero = (x == 0).flatten(1).all(dim=1)[:, None, None]
        return torch.where(is_zero, opening, u @ turn @ vh)

    return s.stream("adversary", unit, oblivious=False)


def replay(
    gradients: Tensor | str | Path,
    *,
    bound: float | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    oblivious: bool = True,
) -> Stream:
    """Recorded gradients: a tensor (T, m, n) or (T, b, m, n), or the file torch.save made of one.

    A file is mapped into memory, not read. The gradients are played as recorded, with their largest
    operator norm for `gradient_bound`; if a `bound` is given, one constant brings that norm to it.
    `dtype` is the recording's by default, `device` torch's.

    `oblivious=False` says that the recording is not fixed in advance for the learner it is played
    to. That is so where it answered actions made from the same noise: gradients recorded against
    FTPL with a seed depend on that seed's noise, and replayed to it they prove nothing.
    """
    if isinstance(gradients, (str, Path)):
        gradients = torch.load(gradients, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(gradients, Tensor) or gradients.ndim not in (3, 4) or 0 in gradients.shape:
        raise ValueError(
            f"gradients must be a nonempty tensor (T, m, n) or (T, b, m, n), got "
            f"{getattr(gradients, 'shape', type(gradients).__name__)}; stack the recorded rounds"
        )
    recording, recorded_dtype = gradients, gradients.dtype if dtype is None else dtype
    rounded = (_checks.matrix("gradients", g).to(recorded_dtype).double() for g in recording)
    largest = max(float(operator_norm(g).max()) for g in rounded)
    if largest == 0:
        raise ValueError("gradients must not all be zero: their norm sets the scale of the game")
    largest *= 1 + max(recording.shape[-2:]) * ROUNDING  # upwards, so that it is a bound
    top, factor = (largest, 1.0) if bound is None else (bound, 1 / largest)
    s = Setting(tuple(recording.shape[1:]), bound=top, dtype=recorded_dtype, device=device)

    def unit(t: int, action: Tensor | None) -> Tensor:
        recorded = recording[t - 1].to(s.device, torch.float64) * factor
        return oriented(recorded, s.shape).reshape(-1, s.short, s.long)

    stream = s.stream("replay", unit, oblivious=oblivious, rounds=len(recording))
    return stream if bound is not None else replace(stream, scale=1.0)


STREAMS: Mapping[str, Callable[..., Stream]] = MappingProxyType(
    {
        "alternating": alternating,
        "gaussian": gaussian,
        "low-rank": low_rank,
        "ill-conditioned": ill_conditioned,
        "drifting": drifting,
        "sparse": sparse,
        "heavy-tailed": heavy_tailed,
        "adversary": adversary,
        "worst": worst,
        "replay": replay,
    }
)
"""Every stream by the name that traces and the command line use."""


def _rank(rank: int, s: Setting) -> int:
    if _checks.count("rank", rank) > s.short:
        raise ValueError(f"rank must be at most min(m, n) = {s.short}, got {rank}")
    return rank
