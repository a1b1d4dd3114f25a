"""Argument checks shared by every public function.

Each check raises before anything is computed or changed, and its message names the argument, the
value that was given and what to do instead. Checks that look at tensor values synchronize with the
device, so they belong to the checked public functions, never to an optimizer's step.
"""

import difflib
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

FULL_DTYPES = (torch.float32, torch.float64)
HALF_DTYPES = (torch.float16, torch.bfloat16)
REAL_DTYPES = FULL_DTYPES + HALF_DTYPES
COMPLETE = ("cpu", "cuda", "meta")
"""Devices, ROCm's among them, that have float64, decompositions and `frexp`; others may not."""

ROUNDING = 32
"""A sum A of Gram matrices may have eigenvalues down to −ROUNDING·eps·‖A‖_F by rounding alone;
after twenty thousand rank-one rounds in float32 half of that was seen."""


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an iteration: float32 for half precision, else `dtype` itself."""
    return torch.float32 if dtype in HALF_DTYPES else dtype


def matrix(name: str, value: object, *, dtypes: Sequence[torch.dtype] = REAL_DTYPES) -> Tensor:
    """Return `value` if it is a dense, finite, real tensor (…, m, n) of one of `dtypes`."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(value).__name__}; "
            f"convert it with torch.as_tensor({name})"
        )
    if value.dtype not in dtypes or value.layout is not torch.strided:
        layout = "" if value.layout is torch.strided else f", {value.layout}"
        raise TypeError(
            f"{name} must be dense with a dtype among {_names(dtypes)}, got {value.dtype}{layout}; "
            f"convert it first, e.g. {name}.to(torch.float32)"
        )
    if value.ndim < 2:
        raise ValueError(
            f"{name} must have at least two dimensions (…, m, n), got shape {tuple(value.shape)}; "
            f"reshape a vector to (1, n) or (m, 1)"
        )
    return finite(name, value)


def symmetric(name: str, value: object, *, size: int | None = None, side: str = "rows") -> Tensor:
    """Return `value` if it is a finite symmetric matrix (…, m, m), with m = `size` if given."""
    tensor = matrix(name, value)
    rows, columns = tensor.shape[-2:]
    if rows != columns:
        raise ValueError(
            f"{name} must be square, got shape {tuple(tensor.shape)}; pass a Gram matrix such as "
            f"L @ L.mT"
        )
    if size not in (None, rows):
        product = "s @ s.mT" if side == "rows" else "s.mT @ s"
        raise ValueError(
            f"{name} must be {size}×{size} to act on the {side}, got shape {tuple(tensor.shape)}; "
            f"form it from the {side}, such as {product}, or transpose s"
        )
    if not tensor.numel():
        return tensor
    # A Gram product accumulates about √m rounding errors per entry; eight m of them is generous
    # and still refuses anything a person would call asymmetric. Subnormals round by more.
    info = torch.finfo(tensor.dtype)
    scale = tensor.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(info.smallest_normal)
    if ((tensor - tensor.mT).abs() > 8 * rows * info.eps * scale).any():
        raise ValueError(
            f"{name} must be symmetric up to rounding, its largest asymmetry is "
            f"{(tensor - tensor.mT).abs().max().item():.3g}; pass ({name} + {name}.mT) / 2"
        )
    return tensor


def acting_on(name: str, value: object, s: Tensor, *, side: str = "rows") -> Tensor:
    """Return `value` if it is a positive semidefinite matrix for the rows or columns of `s`.

    For half-precision `s` it must be float32: half precision cannot represent a Gram matrix.
    """
    tensor = symmetric(name, value, size=s.shape[-2 if side == "rows" else -1], side=side)
    same(name, tensor, "s", s, dtype=work_dtype(s.dtype))
    broadcastable(name, tensor.shape[:-2], "s", s.shape[:-2])
    return positive_semidefinite(name, tensor)


def decomposable(x: Tensor) -> Tensor:
    """Return `x`, moved to the CPU if its device may lack decompositions."""
    return x if x.device.type in COMPLETE else x.cpu()


def positive_semidefinite(name: str, tensor: Tensor) -> Tensor:
    """Return the symmetric `tensor` if no eigenvalue is more negative than rounding explains."""
    if tensor.numel() == 0:
        return tensor
    x, info = decomposable(tensor), torch.finfo(tensor.dtype)
    # Subnormals round like the smallest normal number, whatever their size.
    least = info.smallest_normal
    largest = x.abs().amax(dim=(-2, -1), keepdim=True).double().clamp_min(least)
    wide = x.double() / largest
    norm = torch.linalg.matrix_norm(wide, keepdim=True)
    norm = norm.clamp_min(wide.shape[-1] * least / largest)
    rounding = ROUNDING * info.eps * norm
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    # Cholesky needs a positive definite matrix even where `tensor` is zero.
    _, failed = torch.linalg.cholesky_ex(
        wide + rounding.clamp_min(torch.finfo(wide.dtype).eps) * eye
    )
    if failed.any():
        values = torch.linalg.eigvalsh(wide)
        worst = (values[..., 0] / values.abs().amax(-1)).min().item()
        raise ValueError(
            f"{name} must be positive semidefinite, its smallest relative eigenvalue is "
            f"{worst:.3g}; pass a Gram matrix such as L @ L.mT"
        )
    return tensor


def finite(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` if it has no NaN and no infinity."""
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise ValueError(
            f"{name} must be finite, got {bad} NaN or infinite entries of {tensor.numel()}; "
            f"find where they arise (torch.autograd.set_detect_anomaly) or mask them first"
        )
    return tensor


def same(
    name: str, tensor: Tensor, other_name: str, other: Tensor, *, dtype: torch.dtype | None = None
) -> None:
    """Check that two tensors share the device and the dtype, or that the first has `dtype`."""
    expected = other.dtype if dtype is None else dtype
    if tensor.dtype != expected:
        raise TypeError(
            f"{name} has dtype {tensor.dtype} but {other_name} has {other.dtype}, which needs "
            f"{expected}; convert it: {name}.to({expected})"
        )
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device} but {other_name} is on {other.device}; "
            f"move one: {name}.to({str(other.device)!r})"
        )


def broadcastable(name: str, shape: torch.Size, other_name: str, other: torch.Size) -> None:
    """Check that `shape` broadcasts to `other`."""
    if shape == other:  # torch.broadcast_shapes is slow, and imports much the first time
        return
    try:
        joint = torch.broadcast_shapes(shape, other)
    except RuntimeError:
        joint = None
    if joint != other:
        raise ValueError(
            f"the batch shape {tuple(shape)} of {name} does not broadcast to {tuple(other)}, that "
            f"of {other_name}; give both the same leading dimensions"
        )


def choice(name: str, value: object, options: Collection[str]) -> str:
    """Return `value` if it is one of `options`."""
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {_names(options)}, got {value!r}")
    return value


def unknown(kind: str, name: str, names: Collection[str]) -> tuple[str, str]:
    """Return a sentence on an unknown name, and a hint: the nearest name, or all of them."""
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(names)}"
    return f"there is no {kind} {name!r}", hint


def positive(name: str, value: float) -> float:
    """Return `value` as a float if it is finite and > 0."""
    number = _number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return number


def nonnegative(name: str, value: float) -> float:
    """Return `value` as a float if it is finite and ≥ 0."""
    number = _number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be a finite number ≥ 0, got {value!r}")
    return number


def fraction(name: str, value: float, *, closed: str = "") -> float:
    """Return `value` as a float if it lies in (0, 1); `closed` may add the ends "0" and "1"."""
    number = _number(name, value)
    if not (0 < number < 1 or (number == 0 and "0" in closed) or (number == 1 and "1" in closed)):
        interval = f"{'[' if '0' in closed else '('}0, 1{']' if '1' in closed else ')'}"
        raise ValueError(f"{name} must lie in {interval}, got {value!r}")
    return number


def count(name: str, value: int, *, minimum: int = 1) -> int:
    """Return `value` if it is an integer ≥ `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be an integer ≥ {minimum}, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be an integer ≥ {minimum}, got {value}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def _names(options: Collection[object]) -> str:
    return ", ".join(repr(o) if isinstance(o, str) else str(o) for o in options)
