"""Shared by all streams: the protocol, the options, the noise, and gradients of norm ≤ G.

‖G_t‖_op ≤ G holds exactly, rounding to `dtype` included: a gradient is formed in float64 with norm
at most one, then multiplied by G·(1 − slack), where the slack pays for the worst rounding of the
entries (eps·√m, m the shorter side: 7e-7 in float32 at 32×64).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.linalg.norms import operator_norm, surely_within
from nucleon.online.regret import Shape, game_shape

TAIL = 3.0
"""A Gaussian matrix exceeds its expected norm by more with probability ≤ e^(−9/2)."""
ROUNDING = 2.0**-46
"""Per column: far above what a float64 product, QR or SVD loses."""
_NOISE_SEED = 0x73747265616D73  # apart from the learners' noise, which users also seed from 0 up


class StreamOptions(TypedDict, total=False):
    """Keyword options of every stream but `replay`."""

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
        """Return G_t for t ≥ 1; `action` is X_t, which an oblivious stream ignores."""
        ...


@dataclass(frozen=True, eq=False)
class Generated:
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
        """Return G_t for t ≥ 1."""
        _checks.count("t", t)
        scaled = (self.unit(t, action) * self.scale).to(self.dtype)
        return oriented(scaled, self.shape).reshape(self.shape)


class Setting:
    """Base of all streams: checked options, noise, and matrices (b, short, long) in float64."""

    def __init__(
        self,
        shape: Shape,
        *,
        bound: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.shape = game_shape(shape)
        self.short, self.long = sorted(self.shape[-2:])
        self.games = math.prod(self.shape[:-2])
        self.bound = _checks.positive("bound", bound)
        self.seed = None if seed is None else _checks.count("seed", seed, minimum=0)
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.device = torch.get_default_device() if device is None else torch.device(device)

    def stream(
        self,
        name: str,
        unit: Callable[[int, Tensor | None], Tensor],
        *,
        exact: bool = False,
        oblivious: bool = True,
        rounds: int | None = None,
    ) -> Generated:
        """Return the stream of gradients `unit` of norm ≤ 1, a float64 stack (b, short, long).

        Their norm is at most G, and eps·√m below it (2 % in bfloat16 at 8 rows) unless `exact`, for
        gradients whose entries times G need no rounding. Tall shapes are transposed afterwards.
        """
        # Rounding moves each entry by eps/2 of itself, the norm by eps·√short/2, and as much again
        # covers entries that become subnormal.
        slack = torch.finfo(self.dtype).eps * math.sqrt(self.short) + self.long * ROUNDING
        scale = _rounded_down(self.bound, self.dtype) * (1 if exact else 1 - slack)
        setting = (self.shape, self.bound, self.dtype, self.device)
        return Generated(name, *setting, oblivious, rounds, scale, unit)

    def draw(
        self,
        distribution: Callable[..., Tensor],
        t: int,
        *,
        rows: int | None = None,
        columns: int | None = None,
        sample: int = 0,
        device: torch.device | None = None,
    ) -> Tensor:
        """Draw the noise of round t; what is fixed over the rounds is drawn at t = 0."""
        seed, device = self.seed or 0, self.device if device is None else device
        batched = len(self.shape) == 3
        return distribution(
            (self.games, rows or self.short, columns or self.long),
            seed=_NOISE_SEED,
            stream=torch.arange(seed, seed + self.games, device=device) if batched else seed,
            step=t,
            sample=sample,
            dtype=torch.float64,
            device=device,
        )

    def gaussian(self, t: int, rows: int | None = None, columns: int | None = None) -> Tensor:
        """Return a Gaussian matrix of norm ≤ 1."""
        z = self.draw(noise.normal, t, rows=rows, columns=columns)
        return clipped(z * gaussian_scale(*z.shape[-2:]))

    def orthonormal(self, rows: int, columns: int, sample: int) -> Tensor:
        """Return Haar-distributed orthonormal columns, equal in all rounds and on all devices."""
        size: dict[str, int] = {"rows": rows, "columns": columns, "sample": sample}
        q, r = torch.linalg.qr(self.draw(noise.normal, 0, **size, device=torch.device("cpu")))
        return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).to(self.device)

    def isometry(self, rank: int) -> Tensor:
        """Return the leading `rank` rows of the identity, turned at random if there is a seed."""
        if self.seed is not None:
            return self.orthonormal(self.short, rank, 0) @ self.orthonormal(self.long, rank, 1).mT
        leading = torch.arange(self.short, device=self.device) < rank
        return (self.identity() * leading[:, None]).expand(self.games, -1, -1)

    def identity(self) -> Tensor:
        """Return [I 0], (short, long)."""
        return torch.eye(self.short, self.long, dtype=torch.float64, device=self.device)

    def quarter_turn(self) -> Tensor:
        """Return [I 0]J, J = −Jᵀ, which maps coordinate i to i + ⌊n/2⌋, and that one to −i."""
        half = self.long // 2
        ones = torch.ones(self.long - half, dtype=torch.float64, device=self.device)
        j = ones.diag(half)
        j[:, 2 * half :] = 0  # the coordinate without a partner
        return (j - j.mT)[: self.short]


def gaussian_scale(rows: int, columns: int) -> float:
    """Return 1/(√m + √n + 3), by which nearly all Gaussian matrices have norm below 1."""
    return 1 / (math.sqrt(rows) + math.sqrt(columns) + TAIL)


def clipped(x: Tensor) -> Tensor:
    """Return the matrices x / max(1, ‖x‖_op)."""
    return x if surely_within(x, 1.0) else x / operator_norm(x).clamp(min=1)[..., None, None]


def oriented(x: Tensor, shape: Shape) -> Tensor:
    """Return the transposed matrices where `shape` is tall."""
    return x.mT if shape[-2] > shape[-1] else x


def _rounded_down(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` that is at most `value`."""
    nearest = torch.tensor(value, dtype=dtype, device="cpu")
    if float(nearest) > value:
        nearest = torch.nextafter(nearest, torch.zeros_like(nearest))
    return float(nearest)
