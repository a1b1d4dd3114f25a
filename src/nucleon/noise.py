"""Counter-based noise: every number is a function of (seed, stream, step, sample) and nothing else.

A 64-bit key is hashed from the four integers and the number of the distribution. The random words
are hashes of that key and a counter, by the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA
2014). There is no state: a resumed run repeats bit for bit, and matrices drawn in one stack equal
those drawn one by one.

Each value uses 32 random bits whatever the dtype, so float32 noise is float64 noise up to rounding,
normals end at √(64 ln 2) ≈ 6.66 and exponentials at 32 ln 2 ≈ 22.2. The random words are the same
on every device; logarithms and cosines differ between devices by a few units in the last place.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nucleon import _checks

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2⁶⁴/φ, odd, as a signed word
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
# The first word of a key keeps the distributions apart.
_NORMAL, _EXPONENTIAL, _UNIFORM, _SIGN, _SEED = 1, 2, 3, 4, 5


class Distribution:
    """Noise of one distribution, drawn by calls.

    Integer tensors among `stream`, `step` and `sample` broadcast to a batch shape, which must be
    the leading dimensions of `shape`. Each entry of the batch has its own sequence, which fills the
    remaining dimensions. For example, `normal((b, m, n), seed=s, stream=ids)` with `ids` of shape
    (b,) stacks the b matrices `normal((m, n), seed=s, stream=id)`; `sample=arange(k)` adds an axis
    of k draws, and each draw does not depend on k. The call does not synchronize with the host, so
    it can be compiled or captured in a CUDA graph.

    Args:
        number: first word of the key, another for each distribution.
        values: maps random int32 words, converted to floats, to as many values; may overwrite them.
    """

    def __init__(self, number: int, values: Callable[[Tensor], Tensor]) -> None:
        self.number, self.values = number, values

    def __call__(
        self,
        shape: tuple[int, ...],
        *,
        seed: int,
        stream: int | Tensor = 0,
        step: int | Tensor = 0,
        sample: int | Tensor = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draw noise.

        Args:
            shape: shape of the result.
            seed: any integer (modulo 2⁶⁴).
            stream: identity of the parameter or game (default 0).
            step: round or optimizer step (default 0).
            sample: number of the draw (default 0).
            dtype: float16, bfloat16, float32 or float64 (default: torch's).
            device: of the result (default: torch's); the tensors above must be on it, or 0-d.
        """
        dtype = torch.get_default_dtype() if dtype is None else dtype
        words = _words(self.number, shape, seed, stream, step, sample, device)
        wide = torch.float32 if dtype in _checks.HALF_DTYPES else dtype  # one call less in a step
        noise = self.values(words.to(wide))
        size = math.prod(shape[noise.ndim - 1 :])  # a block of odd size is padded by one entry
        return noise[..., :size].reshape(shape).to(dtype)


def _normal(words: Tensor) -> Tensor:
    pairs = words.shape[-1] // 2
    radius = _unit(words[..., :pairs]).log_().mul_(-2).sqrt_()
    angle = words[..., pairs:].mul_(math.pi * 2.0**-31)
    return torch.cat((angle.cos().mul_(radius), angle.sin().mul_(radius)), dim=-1)


def _unit(words: Tensor) -> Tensor:
    """Map x to |x + ½|·2⁻³¹ ∈ (0, 1] in place; a float near 0 keeps all bits of x in the tail."""
    return words.add_(0.5).abs_().mul_(2.0**-31)


normal = Distribution(_NORMAL, _normal)
"""Standard normal noise: √(−2 ln u)·(cos θ, sin θ), u and θ uniform."""
exponential = Distribution(_EXPONENTIAL, lambda words: _unit(words).log_().neg_())
"""Exponential noise of mean one: −ln u."""
uniform = Distribution(_UNIFORM, _unit)
"""Uniform noise on (0, 1]: multiples of 2⁻³¹ plus 2⁻³²."""
signs = Distribution(_SIGN, lambda words: torch.where(words < 0, -1.0, 1.0))
"""Fair signs ±1."""


def derived_seed(seed: int, number: int) -> int:
    """Return a 64-bit hash of `seed` and `number`; neighbouring seeds give unrelated ones.

    Args:
        seed: any integer (modulo 2⁶⁴).
        number: any integer (modulo 2⁶⁴).
    """
    key = _mix_int((_SEED ^ _signed(seed)) + GOLDEN)
    return _mix_int((key ^ _signed(number)) + GOLDEN)


def normal_key(seed: int) -> int:
    """Return the key of normal noise after absorbing the seed, a signed 64-bit word.

    A kernel that draws the noise itself absorbs step, sample and stream next, in this order.
    """
    return _mix_int((_NORMAL ^ _signed(seed)) + GOLDEN)


def _words(
    distribution: int,
    shape: tuple[int, ...],
    seed: int,
    stream: int | Tensor,
    step: int | Tensor,
    sample: int | Tensor,
    device: torch.device | str | None,
) -> Tensor:
    """Return random int32 words (*batch, 2·pairs), at least one per entry of a block of `shape`."""
    key: int | Tensor = distribution
    # Integers are hashed on the host until the first tensor; `stream` is the likeliest one.
    for name, word in (("seed", seed), ("step", step), ("sample", sample), ("stream", stream)):
        key = _absorb(key, _integer(name, word))
    batch = tuple(key.shape) if isinstance(key, Tensor) else ()
    if tuple(shape[: len(batch)]) != batch:
        raise ValueError(
            f"shape must begin with {batch}, the shape that stream, step and sample broadcast to, "
            f"got {tuple(shape)}"
        )
    pairs = (math.prod(shape[len(batch) :]) + 1) // 2
    words = _sequence(key, pairs, device)
    if torch.compiler.is_compiling():  # some compilers give the new dimension a stride of 0
        low, high = words.to(torch.int32), (words >> 32).to(torch.int32)
        return torch.stack((low, high), dim=-1).flatten(-2)
    return words.unsqueeze(-1).view(torch.int32).flatten(-2)  # an empty stack may have stride 0


def _sequence(key: int | Tensor, length: int, device: torch.device | str | None) -> Tensor:
    """Return the 64-bit words mix((key ⊕ w)·golden + mix(key + golden)), w = 0, …, length − 1.

    Without the second term, keys that differ in low bits only would have equal words, permuted.
    """
    other = _absorb(key, 0)
    if isinstance(key, Tensor) and isinstance(other, Tensor):
        key, other = key.unsqueeze(-1), other.unsqueeze(-1)
    # Not w·golden alone: a compiler may assume that a multiple of a loop index never overflows.
    counter = torch.arange(length, device=device)
    return _mix((counter ^ key).mul_(GOLDEN).add_(other))


def _absorb(key: int | Tensor, word: int | Tensor) -> int | Tensor:
    """Return mix((key ⊕ word) + golden), a bijection of `word` for each key and vice versa."""
    mixed = (key ^ word) + GOLDEN
    return _mix(mixed) if isinstance(mixed, Tensor) else _mix_int(mixed)


def _mix(z: Tensor) -> Tensor:
    """Apply splitmix64's finalizer in place to an int64 tensor."""
    for shift, factor in ROUNDS:
        # torch shifts arithmetically: the mask clears the copies of the sign bit.
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            z.mul_(factor)
    return z


def _mix_int(z: int) -> int:
    """Return splitmix64's finalizer of an integer, as a signed 64-bit word."""
    z &= (1 << 64) - 1
    for shift, factor in ROUNDS:
        z = ((z ^ (z >> shift)) * factor) & ((1 << 64) - 1)
    return _signed(z)


def _signed(word: int) -> int:
    """Return the signed 64-bit word congruent to `word` modulo 2⁶⁴."""
    return ((word + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def _integer(name: str, word: int | Tensor) -> int | Tensor:
    if isinstance(word, Tensor):
        if word.is_floating_point() or word.is_complex():
            raise TypeError(
                f"{name} must hold integers, got {word.dtype}; convert it: {name}.to(torch.int64)"
            )
        return word.to(torch.int64)
    if isinstance(word, bool) or not isinstance(word, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be an integer or an integer tensor, got {word!r}")
    return _signed(word)
