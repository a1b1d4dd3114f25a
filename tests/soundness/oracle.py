"""One step of Muon, Pion and Leon in float64 from the equations, and what rounding may add.

For a matrix with its short side first, from the state before the step:

    Ĝ ← β₁Ĝ + G,   M̂ ← β₂M̂ + GGᵀ              both zero once ‖Ĝ‖_F² and Tr M̂ are below tiny/eps
    S = Ĝ, or β₁Ĝ + G with `nesterov`;   Λ = c(G_max²β₁⁻²I + M̂)
    P = (SSᵀ + Λ)^(-1/2) S                     0 while the matrix rests; polar(S) for Muon
    skipped where a number in it leaves its dtype: then nothing changes

Only torch's float64 decompositions are used, none of the package's code.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

REFERENCE = ("svd", "eigh")
NARROW = ("half", "bfloat16")
JORDAN = 1.2024
"""The largest value of 3.4445x − 4.775x³ + 2.0315x⁵ on [0, 1]; it maps its own range below that."""


def work(dtype: torch.dtype) -> torch.dtype:
    """The dtype a step is computed in."""
    return dtype if dtype == torch.float64 else torch.float32


def contract(method: str, dtype: torch.dtype) -> float:
    """By how much ‖P‖_op may exceed 1, before P is rounded to the dtype of the weights."""
    if method in NARROW:
        return 1e-2
    if method == "muon":
        return JORDAN - 1 + 1e-3
    if method in REFERENCE:
        return 1e-9 if dtype == torch.float64 else 1e-5
    return 1e-3


def _settles(total: Tensor, quiet: int, group) -> bool:
    """Return True if Leon's direction falls by itself, under a bound its gradients may keep."""
    if "samples" in group or not group.get("gradient_bound") or not group["smoothing_scale"]:
        return False
    most = group["gradient_bound"] / (1 - group["momentum"])  # of ‖Ĝ‖_op
    most *= 2 * math.sqrt(min(total.shape)) * group["momentum"] ** quiet
    return bool(torch.linalg.matrix_norm(total) < most)


def quiet_steps(momentum: float) -> float:
    """Return the number of steps of full length after the last gradient of a matrix."""
    return int(1 / math.log(1 / momentum)) if momentum else 0


@dataclass
class Expected:
    """Effect of a step on one matrix; `None` is "either, by rounding"."""

    total: Tensor
    gram: Tensor | None
    quiet: int
    skipped: bool | None
    faded: bool | None
    rests: bool
    direction: Tensor
    condition: float
    """Condition number of [S L], Λ = LLᵀ, infinite for a singular one."""


def expected(
    total: Tensor, gram: Tensor | None, quiet: int, gradient: Tensor, dtype: torch.dtype, group
) -> Expected:
    """The step of a group on a matrix whose short side is first; all tensors float64."""
    limits = torch.finfo(work(dtype))
    least, momentum = limits.tiny / limits.eps, group["momentum"]
    gradient = -gradient if group["maximize"] else gradient
    total = momentum * total + gradient
    ahead, smoothing = total, None
    if gram is not None:
        beta2 = group["beta2"]
        gram = (momentum**2 if beta2 is None else beta2) * gram + gradient @ gradient.mT
    faded = _faded(total, gram, least)
    if faded:
        total, gram = torch.zeros_like(total), None if gram is None else torch.zeros_like(gram)
        ahead = total
    elif group["nesterov"]:
        ahead = momentum * total + gradient
    if gram is not None:
        scale = group["smoothing_scale"]
        bound = (group["gradient_bound"] / (momentum or 1.0)) ** 2
        eye = torch.eye(len(gram), dtype=torch.float64)
        smoothing = None if isinstance(scale, str) else scale * (bound * eye + gram)
    largest = torch.finfo(group["momentum_dtype"] or work(dtype)).max
    held = [(gradient, limits.max), (total, largest), (ahead, limits.max)]
    held += [(x, limits.max) for x in (gram, smoothing) if x is not None]
    quiet = 0 if gradient.any() else quiet + 1
    rests = quiet > quiet_steps(momentum) and not _settles(total, quiet, group)
    skipped = _skipped(held)
    if skipped is False and not faded and not rests:
        direction, condition = exact(ahead, smoothing)
    else:
        direction, condition = torch.zeros_like(total), math.inf
    return Expected(total, gram, quiet, skipped, faded, rests, direction, condition)


def _faded(total: Tensor, gram: Tensor | None, least: float) -> bool | None:
    sizes = [total.norm().item() ** 2] + ([] if gram is None else [gram.trace().item()])
    if all(size < least * (1 - 1e-3) for size in sizes):
        return True
    return None if all(size < least * (1 + 1e-3) for size in sizes) else False


def _skipped(held: list[tuple[Tensor, float]]) -> bool | None:
    """A square may be refused from its trace on, at half of the largest number."""
    if any(not x.isfinite().all() or x.abs().max() > most * (1 + 1e-2) for x, most in held):
        return True
    room = [x.abs().max() * (len(x) if x.shape[0] == x.shape[1] else 1) for x, _ in held]
    if any(size > most * 0.49 for size, (_, most) in zip(room, held, strict=True)):
        return None
    return False


def exact(s: Tensor, smoothing: Tensor | None) -> tuple[Tensor, float]:
    """(SSᵀ + Λ)^(-1/2) S by the singular value decomposition of [S L], and its condition."""
    unit = s.abs().max().item()
    if smoothing is not None:
        unit = max(unit, smoothing.abs().max().sqrt().item())
    if unit == 0:
        return torch.zeros_like(s), math.inf
    whole = s / unit
    if smoothing is not None:
        values, vectors = torch.linalg.eigh(smoothing / unit / unit)
        whole = torch.cat([whole, vectors * values.clamp_min(0).sqrt()], dim=-1)
    u, sigma, vh = torch.linalg.svd(whole, full_matrices=False)
    condition = (sigma[0] / sigma[-1]).item() if sigma[-1] > 0 else math.inf
    kept = sigma > 1e-12 * sigma[0]
    return (u * kept) @ vh[:, : s.shape[1]], condition


def direction_error(
    method: str, dtype: torch.dtype, n: int, condition: float, decay: float
) -> float:
    """The largest ‖P − exact‖_op of a method; infinite where it promises none.

    Rounding of the moments by n·eps moves (SSᵀ + Λ)^(-1/2)S by half of that times its condition,
    the square of that of [S L]. Five optimal quintics bring all that is above 0.3 % of the
    Frobenius norm to 0.99; float16 and bfloat16 add their own noise. With β₂ near 1, `decay`, they
    add to Λ what rounding may have taken from the sum that M̂ is.
    """
    square = torch.finfo(work(dtype)).eps * condition * condition
    rounding = 4 * n * square
    if method in REFERENCE:
        return contract(method, dtype) + rounding
    if method in ("auto", "polar-express", "coupled") and condition * math.sqrt(2 * n) < 100:
        return 0.02 + rounding + square / (1 - decay)
    if method in NARROW and condition < 10 and condition * math.sqrt(n) < 300:
        return 0.1
    return math.inf
