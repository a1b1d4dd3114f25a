"""Matrices with chosen spectra, and hypothesis strategies over everything a caller may pass."""

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

F64 = torch.float64
FULL = (torch.float64, torch.float32)
HALF = (torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (1, 7), (6, 1), (5, 5), (4, 9), (12, 3), (17, 17))
EMPTY = ((0, 3, 4), (2, 0, 4), (2, 4, 0), (0, 0), (0, 5), (5, 0), (3, 0, 2, 2))

# DESIGN's promise of ‖P‖_op − 1: the references, then the iterations.
REFERENCE = {F64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
ITERATIVE = REFERENCE | {F64: 1e-3, torch.float32: 1e-3}

shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**31)


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def smallest(dtype: torch.dtype) -> float:
    """The smallest subnormal number."""
    return torch.finfo(dtype).tiny * eps(dtype)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def orthogonal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(rows, columns, seed=seed)).Q


def geometric(size: int, log_cond: float, rank: int | None = None) -> Tensor:
    """1 down to 10^-log_cond in equal ratios, the entries after the first `rank` zero."""
    values = torch.logspace(0, -log_cond, size, dtype=F64)
    values[size if rank is None else rank :] = 0
    return values


def with_singular_values(shape: tuple[int, int], sigma: Tensor, seed: int = 0) -> Tensor:
    u, v = (orthogonal(side, len(sigma), seed + i) for i, side in enumerate(shape))
    return (u * sigma) @ v.mT


def symmetrized(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


def with_eigenvalues(values: Tensor, seed: int = 0) -> Tensor:
    q = orthogonal(len(values), len(values), seed)
    return symmetrized((q * values) @ q.mT)


def gram(factor: Tensor) -> Tensor:
    """LLᵀ in the dtype of L: a semidefinite matrix that rounding may have made indefinite."""
    return symmetrized(factor @ factor.mT)


def times_power_of_two(x: Tensor, power: int) -> Tensor:
    """x·2^power without an intermediate overflow, exact while the result is normal."""
    half = power // 2
    return ((x.double() * 2.0**half) * 2.0 ** (power - half)).to(x.dtype)


def unit(x: Tensor) -> tuple[Tensor, int]:
    """x·2^-e in float64, its largest entry in [½, 1), and e; exact."""
    e = math.frexp(x.double().abs().max().item())[1] if x.any() else 0
    return times_power_of_two(x.double(), -e), e


def operator_norms(x: Tensor) -> Tensor:
    """Largest singular values in float64, 0 for matrices without entries."""
    return torch.linalg.matrix_norm(x.double(), 2) if x.numel() else x.new_zeros(x.shape[:-2])


class Problem(NamedTuple):
    """S and Λ as a caller would hand them over."""

    s: Tensor
    smoothing: Tensor


def exponents(dtype: torch.dtype, *, spare: int = 0) -> st.SearchStrategy[int]:
    """Powers of two that keep numbers of at most 2^3, of relative size ≥ 2^-spare, normal."""
    info = torch.finfo(dtype)
    return st.integers(math.ceil(math.log2(info.tiny)) + spare, math.floor(math.log2(info.max)) - 3)


def whole_range(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """Every power of two that is a number of the dtype, from the smallest subnormal one."""
    return st.integers(*ends(dtype))


def ends(dtype: torch.dtype) -> tuple[int, int]:
    """The exponents of the smallest and of the largest power of two of the dtype."""
    info = torch.finfo(dtype)
    return math.frexp(info.tiny * info.eps)[1] - 1, math.frexp(info.max)[1] - 1


def at_scale(x: Tensor, power: int, dtype: torch.dtype) -> Tensor:
    """`x` with its largest entry brought to 2^power, a number of `dtype`, and rounded once."""
    largest = x.abs().max() if x.numel() else torch.ones(())
    return times_power_of_two(x / torch.where(largest > 0, largest, 1.0), power).to(dtype)


def ranked(
    shape: tuple[int, int], rank: int, log_cond: float, power: int, dtype: torch.dtype, seed: int
) -> Tensor:
    """A matrix of this rank and condition, up to one rounding of its entries."""
    sigma = geometric(min(shape), log_cond, rank)
    return at_scale(with_singular_values(shape, sigma, seed), power, dtype)


@st.composite
def ranged(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Any shape, rank, condition number up to 1e12 and scale that the dtype can hold."""
    shape = draw(shapes)
    rank, log_cond = draw(st.integers(0, min(shape))), draw(st.floats(0, 12))
    return ranked(shape, rank, log_cond, draw(whole_range(dtype)), dtype, draw(seeds))


def discounted(m: int, power: int, dtype: torch.dtype, seed: int, rounds: int = 30) -> Tensor:
    """M ← 0.9M + ggᵀ in the dtype itself, every sum rounded: what an optimizer keeps."""
    total = torch.zeros(m, m, dtype=dtype)
    for gradient in normal(rounds, m, 1, seed=seed):
        total = (0.9 * total.double()).to(dtype) + at_scale(gradient @ gradient.mT, power, dtype)
    return total


@st.composite
def semidefinite(draw: st.DrawFn, m: int, dtype: torch.dtype, power: int) -> Tensor:
    """LLᵀ of any rank and condition, rounded once, or a discounted sum of rank-one matrices."""
    seed = draw(seeds)
    if draw(st.booleans()):
        return discounted(m, power - 4, dtype, seed)  # sums to at most ten times its terms
    values = geometric(m, draw(st.floats(0, 12)), draw(st.integers(0, m)))
    return at_scale(with_eigenvalues(values, seed), power, dtype)


@st.composite
def ranged_problems(draw: st.DrawFn, dtype: torch.dtype) -> Problem:
    """S and Λ over the whole range, of unrelated scales or where SSᵀ and Λ interact."""
    s, work = draw(ranged(dtype)), work_dtype(dtype)
    power = draw(whole_range(work))
    if draw(st.booleans()) and s.any():
        two = 2 * math.frexp(s.abs().max().item())[1] + draw(st.integers(-30, 30))
        least, most = ends(work)
        power = min(max(two, least), most)
    return Problem(s, draw(semidefinite(s.shape[-2], work, power)))
