"""Gradient sequences for the online game: any round at random access, from a seed, without state.

`stream.gradient(t, action)` is the t-th gradient G_t, t = 1, 2, …, as a function of the seed, of t
and, for an adaptive stream, of the learner's action X_t. Nothing is stored from round to round, so
a million rounds take the memory of one.

The shape is (m, n), or (b, m, n) for b independent games, of which game i is that of the shape
(m, n) with the seed `seed + i`. A tall shape has the transposed gradients of the wide one.

‖G_t‖_op ≤ G holds exactly, rounding to `dtype` included: a gradient is formed in float64 with norm
at most one, then multiplied by G·(1 − slack), where the slack pays for the worst rounding of the
entries (eps·√m, m the shorter side: 7e-7 in float32 at 32×64). Where a norm has to be computed, it
is the root of the largest eigenvalue of the Gram matrix on the shorter side.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from nucleon import _checks, noise

Shape = tuple[int, ...]

_NOISE_SEED = 0x73747265616D73  # apart from the learners' noise, which users also seed from 0 up
_TAIL = 3.0  # a Gaussian matrix exceeds its expected norm by more with probability ≤ e^(−9/2)
_ROUNDING = 2.0**-46  # per column: far above what a float64 product, QR or SVD loses


class Options(TypedDict, total=False):
    """What every stream but `replay` takes, by keyword."""

    bound: float  # the gradient bound G (default 1)
    seed: int  # of the sequence (default 0)
    dtype: torch.dtype | None  # of the gradients (default: torch's)
    device: torch.device | str | None  # of the gradients (default: torch's)


class Stream(Protocol):
    """A sequence of gradients G_1, G_2, … with ‖G_t‖_op ≤ `gradient_bound`.

    `oblivious` says that the sequence is fixed in advance, whatever the learner plays; `rounds` is
    its length, None when it never ends. Any object with these members can be played.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> Shape: ...  # noqa: D102
    @property
    def gradient_bound(self) -> float: ...  # noqa: D102
    @property
    def oblivious(self) -> bool: ...  # noqa: D102
    @property
    def rounds(self) -> int | None: ...  # noqa: D102
    def gradient(self, t: int, action: Tensor | None = None) -> Tensor:
        """G_t for t ≥ 1; `action` is X_t, which an oblivious stream ignores."""
        ...


@dataclass(frozen=True, eq=False)
class _Generated:
    """The stream of gradients unit(t, X_t)·scale, where `unit` is a float64 stack of norm ≤ 1."""

    name: str
    shape: Shape
    gradient_bound: float
    dtype: torch.dtype
    device: torch.device
    oblivious: bool
    rounds: int | None
    scale: float = field(repr=False)
    unit: Callable[[int, Tensor | None], Tensor] = field(repr=False)

    def gradient(self, t: int, action: Tensor | None = None) -> Tensor:
        _checks.count("t", t)
        if self.rounds is not None and t > self.rounds:
            raise IndexError(
                f"t = {t} is past the end of the stream {self.name!r}, which has {self.rounds} "
                f"rounds; play at most that many"
            )
        scaled = (self.unit(t, action) * self.scale).to(self.dtype)
        return _oriented(scaled, self.shape).reshape(self.shape)


def alternating(shape: Shape, *, rank: int | None = None, **options: Unpack[Options]) -> Stream:
    """½E, then −E, +E, −E, …: the total is ±½E, and a learner that follows it is always wrong.

    E has `rank` (default min(m, n)) singular values equal to the bound, the others 0: the leading
    ones of the identity, or, when a seed is given, in random bases.
    """
    s = _Setting.of(shape, **options)
    direction = s.isometry(_rank(s.short if rank is None else rank, s))

    def unit(t: int, action: Tensor | None) -> Tensor:
        return direction * (0.5 if t == 1 else (-1.0) ** (t - 1))

    return s.stream("alternating", unit, exact=s.seed is None)


def gaussian(shape: Shape, **options: Unpack[Options]) -> Stream:
    """Independent normal entries of deviation G/(√m + √n + 3).

    The few matrices whose norm exceeds the bound, at most 12 in 1000, are scaled back to it.
    """
    s = _Setting.of(shape, **options)
    return s.stream("gaussian", lambda t, _: s.gaussian(t))


def low_rank(shape: Shape, *, rank: int = 1, **options: Unpack[Options]) -> Stream:
    """U Z_t Vᵀ, Z_t Gaussian of side `rank` (default 1): all share one row and one column space.

    U and V have orthonormal columns, drawn once; Z_t is scaled and clipped as in `gaussian`.
    """
    s = _Setting.of(shape, **options)
    rank = _rank(rank, s)
    left, right = s.orthonormal(s.short, rank, 0), s.orthonormal(s.long, rank, 1)
    return s.stream("low-rank", lambda t, _: left @ s.gaussian(t, rank, rank) @ right.mT)


def ill_conditioned(shape: Shape, *, condition: float = 1e3, **options: Unpack[Options]) -> Stream:
    """U diag(σ) Z_t, Z_t Gaussian, σ geometric from 1 to 1/condition (default 1000), U fixed.

    U is a random basis of the shorter side, on which E[G_tG_tᵀ] has the condition number
    condition². Entries have the deviation G/(√n + ‖σ‖ + 3) times σ, and larger norms are clipped.
    """
    s = _Setting.of(shape, **options)
    if _checks.positive("condition", condition) < 1:
        raise ValueError(f"condition must be a finite number ≥ 1, got {condition!r}")
    decay = torch.linspace(0, -1, s.short, dtype=torch.float64, device=s.device)
    basis, spectrum = s.orthonormal(s.short, s.short, 0), (condition**decay).unsqueeze(-1)
    # E‖diag(σ)Z‖_op ≤ √n·max σ + ‖σ‖ (Chevet)
    scale = spectrum / (math.sqrt(s.long) + spectrum.norm() + _TAIL)

    def unit(t: int, action: Tensor | None) -> Tensor:
        return basis @ _clipped(scale * s.draw(noise.normal, t))

    return s.stream("ill-conditioned", unit)


def drifting(
    shape: Shape, *, period: float = 1000.0, noise_level: float = 0.5, **options: Unpack[Options]
) -> Stream:
    """−(1−ν)·Q_t + ν·N_t: the best action is a partial isometry Q_t that turns with the rounds.

    Q_t = U [I 0] R_t Wᵀ, where R_t turns pairs of coordinates of the longer side by 2πt/period (one
    without a partner is multiplied by the cosine), and N_t is the gradient of `gaussian`.
    `period` is in rounds (default 1000); `noise_level` is ν in [0, 1] (default ½).
    """
    s = _Setting.of(shape, **options)
    period = _checks.positive("period", period)
    level = _checks.fraction("noise_level", noise_level, closed="01")
    left, right = s.orthonormal(s.short, s.short, 0), s.orthonormal(s.long, s.long, 1)
    start, quarter = left @ s.identity() @ right.mT, left @ s.quarter_turn() @ right.mT

    def unit(t: int, action: Tensor | None) -> Tensor:
        phase = 2 * math.pi * math.fmod(t, period) / period
        target = math.cos(phase) * start + math.sin(phase) * quarter
        return level * s.gaussian(t) - (1 - level) * target

    return s.stream("drifting", unit)


def sparse(shape: Shape, *, density: float = 0.1, **options: Unpack[Options]) -> Stream:
    """Normal entries, each kept with probability `density` in (0, 1] (default 0.1), the rest 0.

    Their deviation is G/(√density·(√m + √n) + 3); larger norms are scaled back to the bound.
    """
    s = _Setting.of(shape, **options)
    density = _checks.fraction("density", density, closed="1")
    scale = 1 / (math.sqrt(density) * (math.sqrt(s.short) + math.sqrt(s.long)) + _TAIL)

    def unit(t: int, action: Tensor | None) -> Tensor:
        kept = s.draw(noise.uniform, t) <= density
        return _clipped(s.draw(noise.normal, t) * kept * scale)

    return s.stream("sparse", unit)


def heavy_tailed(shape: Shape, *, degrees: float = 2.0, **options: Unpack[Options]) -> Stream:
    """Independent Student t entries with `degrees` of freedom > 0 (default 2), clipped in norm.

    Entries are scaled as in `gaussian`, and a matrix whose norm then exceeds the bound is scaled
    back to it. An entry is √(ν(u^(−2/ν) − 1))·cos θ, u and θ uniform (Bailey 1994).
    """
    s = _Setting.of(shape, **options)
    degrees = _checks.positive("degrees", degrees)
    scale = _gaussian_scale(s.short, s.long)

    def unit(t: int, action: Tensor | None) -> Tensor:
        # e^80 is far into the clipped tail for every ν, and its Gram does not overflow.
        exponent = (s.draw(noise.exponential, t) * (2 / degrees)).clamp(max=80.0)  # −(2/ν) ln u
        radius = exponent.expm1().mul(degrees).sqrt()
        angle = s.draw(noise.uniform, t) * (2 * math.pi)
        return _clipped(radius * angle.cos() * scale)

    return s.stream("heavy-tailed", unit)


def adversary(
    shape: Shape, *, kind: Literal["greedy", "orthogonal"] = "greedy", **options: Unpack[Options]
) -> Stream:
    """An adaptive opponent, which answers the action X_t = U Σ Vᵀ that it sees.

    "greedy" (default) answers G·U[I 0]Vᵀ = argmax ⟨·, X_t⟩, a loss of G‖X_t‖_* in every round: a
    learner whose action does not shrink has linear regret, as FTL and FTPL with k samples.
    "orthogonal" answers G·U J Vᵀ, J the quarter turn of `drifting`: the loss is 0 and the total
    grows across the action, so the comparator is strong. Where n ≥ 2m, a learner that plays along
    the total has regret D‖S_T‖_* = D·G·m√T, the order of the bounds.
    The answer to X_t = 0 is the partial identity, or, when a seed is given, a random isometry.
    """
    s = _Setting.of(shape, **options)
    _checks.choice("kind", kind, ("greedy", "orthogonal"))
    turn = s.identity() if kind == "greedy" else s.quarter_turn()
    opening = s.isometry(s.short)

    def unit(t: int, action: Tensor | None) -> Tensor:
        x = _checks.matrix("action", action)
        if tuple(x.shape) != s.shape:
            raise ValueError(
                f"action must have the shape {s.shape} of the stream, got {tuple(x.shape)}"
            )
        x = _oriented(x.to(s.device, torch.float64), s.shape).reshape(-1, s.short, s.long)
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
    if not isinstance(gradients, Tensor):
        gradients = torch.load(gradients, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(gradients, Tensor) or gradients.ndim not in (3, 4) or 0 in gradients.shape:
        raise ValueError(
            f"gradients must be a nonempty tensor (T, m, n) or (T, b, m, n), got "
            f"{getattr(gradients, 'shape', type(gradients).__name__)}; stack the recorded rounds"
        )
    recording, kept = gradients, gradients.dtype if dtype is None else dtype
    largest = max(float(_recorded_norm(g, kept)) for g in recording)
    if largest == 0:
        raise ValueError("gradients must not all be zero: their norm sets the scale of the game")
    largest *= 1 + max(recording.shape[-2:]) * _ROUNDING  # upwards, so that it is a bound
    top, factor = (largest, 1.0) if bound is None else (bound, 1 / largest)
    s = _Setting.of(tuple(recording.shape[1:]), bound=top, dtype=kept, device=device)

    def unit(t: int, action: Tensor | None) -> Tensor:
        recorded = recording[t - 1].to(s.device, torch.float64) * factor
        return _oriented(recorded, s.shape).reshape(-1, s.short, s.long)

    stream = s.stream("replay", unit, oblivious=oblivious, rounds=len(recording))
    return stream if bound is not None else replace(stream, scale=1.0)


class Entry(NamedTuple):
    """A stream as the command line lists it."""

    constructor: Callable[..., Stream]
    summary: str


def _registry(*constructors: Callable[..., Stream]) -> Mapping[str, Entry]:
    names = (c.__name__.replace("_", "-") for c in constructors)
    summaries = ((c.__doc__ or "").partition("\n")[0] for c in constructors)
    return MappingProxyType(dict(zip(names, map(Entry, constructors, summaries), strict=True)))


STREAMS = _registry(
    *(alternating, gaussian, low_rank, ill_conditioned, drifting),
    *(sparse, heavy_tailed, adversary, replay),
)


@dataclass(frozen=True)
class _Setting:
    """What all streams share: checked options, noise, and matrices (b, short, long) in float64."""

    shape: Shape
    bound: float
    seed: int | None
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(
        shape: Shape,
        *,
        bound: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> "_Setting":
        shape = tuple(shape)
        if len(shape) not in (2, 3):
            raise ValueError(f"shape must be (m, n) or (b, m, n), got {shape}")
        for side in shape:
            _checks.count("every side of shape", side)
        if seed is not None:
            _checks.count("seed", seed, minimum=0)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _checks.choice("dtype", str(dtype), [str(d) for d in _checks.REAL_DTYPES])
        limits = torch.finfo(dtype)
        lowest = limits.tiny * math.sqrt(max(shape[-2:]))
        if not lowest <= _checks.positive("bound", bound) <= limits.max:
            raise ValueError(
                f"bound must lie between {lowest:.3g} and {limits.max:.3g} in {dtype}, "
                f"got {bound!r}; choose a wider dtype"
            )
        device = torch.get_default_device() if device is None else torch.device(device)
        return _Setting(shape, float(bound), seed, dtype, device)

    @property
    def short(self) -> int:
        return min(self.shape[-2:])

    @property
    def long(self) -> int:
        return max(self.shape[-2:])

    def stream(
        self,
        name: str,
        unit: Callable[[int, Tensor | None], Tensor],
        *,
        exact: bool = False,
        oblivious: bool = True,
        rounds: int | None = None,
    ) -> _Generated:
        """The stream of gradients `unit` of norm ≤ 1; `exact` if the dtype holds their entries."""
        # Rounding moves each entry by eps/2 of itself, the norm by eps·√short/2, and as much again
        # covers entries that become subnormal.
        slack = torch.finfo(self.dtype).eps * math.sqrt(self.short) + self.long * _ROUNDING
        scale = _rounded_down(self.bound, self.dtype) * (1 if exact else 1 - slack)
        setting = (self.shape, self.bound, self.dtype, self.device)
        return _Generated(name, *setting, oblivious, rounds, scale, unit)

    def draw(
        self,
        distribution: Callable[..., Tensor],
        t: int,
        *,
        rows: int | None = None,
        columns: int | None = None,
        sample: int = 0,
    ) -> Tensor:
        """Noise of round t; what is fixed over the rounds is drawn at t = 0."""
        seed = self.seed or 0
        batched = len(self.shape) == 3
        return distribution(
            (self._games, rows or self.short, columns or self.long),
            seed=_NOISE_SEED,
            stream=torch.arange(seed, seed + self._games, device=self.device) if batched else seed,
            step=t,
            sample=sample,
            dtype=torch.float64,
            device=self.device,
        )

    def gaussian(self, t: int, rows: int | None = None, columns: int | None = None) -> Tensor:
        """A Gaussian matrix of norm ≤ 1."""
        z = self.draw(noise.normal, t, rows=rows, columns=columns)
        return _clipped(z * _gaussian_scale(*z.shape[-2:]))

    def orthonormal(self, rows: int, columns: int, sample: int) -> Tensor:
        """Haar-distributed orthonormal columns, fixed over the rounds, the same on all devices."""
        cpu = replace(self, device=torch.device("cpu"))
        z = cpu.draw(noise.normal, 0, rows=rows, columns=columns, sample=sample)
        q, r = torch.linalg.qr(z)
        return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(self.device)

    def isometry(self, rank: int) -> Tensor:
        """The leading `rank` rows of the identity, turned at random if there is a seed."""
        if self.seed is not None:
            return self.orthonormal(self.short, rank, 0) @ self.orthonormal(self.long, rank, 1).mT
        leading = torch.arange(self.short, device=self.device) < rank
        return (self.identity() * leading[:, None]).expand(self._games, -1, -1)

    def identity(self) -> Tensor:
        return torch.eye(self.short, self.long, dtype=torch.float64, device=self.device)

    def quarter_turn(self) -> Tensor:
        """[I 0]J, J = −Jᵀ: coordinate i of the longer side goes to i + ⌊n/2⌋, that one to −i."""
        half = self.long // 2
        ones = torch.ones(self.long - half, dtype=torch.float64, device=self.device)
        j = ones.diag(half)
        j[:, 2 * half :] = 0  # the coordinate without a partner
        return (j - j.mT)[: self.short]

    @property
    def _games(self) -> int:
        return math.prod(self.shape[:-2])


def _rank(rank: int, s: _Setting) -> int:
    if _checks.count("rank", rank) > s.short:
        raise ValueError(f"rank must be at most min(m, n) = {s.short}, got {rank}")
    return rank


def _gaussian_scale(rows: int, columns: int) -> float:
    return 1 / (math.sqrt(rows) + math.sqrt(columns) + _TAIL)


def _operator_norm(x: Tensor) -> Tensor:
    """‖x‖_op as (…, 1, 1), for any scale."""
    top = x.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    y = x / top
    gram = y @ y.mT if y.shape[-2] <= y.shape[-1] else y.mT @ y
    return top * torch.linalg.eigvalsh(gram)[..., -1:, None].clamp(min=0).sqrt()


def _recorded_norm(recorded: Tensor, dtype: torch.dtype) -> Tensor:
    return _operator_norm(_checks.matrix("gradients", recorded).to(dtype).double()).max()


def _clipped(x: Tensor) -> Tensor:
    """The matrices x / max(1, ‖x‖_op)."""
    return x / _operator_norm(x).clamp(min=1)


def _oriented(x: Tensor, shape: Shape) -> Tensor:
    """Wide to tall, or tall to wide, when `shape` is tall."""
    return x.mT if shape[-2] > shape[-1] else x


def _rounded_down(value: float, dtype: torch.dtype) -> float:
    """The largest number of `dtype` that is at most `value`."""
    nearest = torch.tensor(value, dtype=dtype, device="cpu")
    if float(nearest) > value:
        nearest = torch.nextafter(nearest, torch.zeros_like(nearest))
    return float(nearest)
