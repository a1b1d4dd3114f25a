"""The polynomials of the option `method`, and the choice of "auto" on each device."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from nucleon import _checks
from nucleon.linalg import coefficients
from nucleon.linalg.coefficients import Quintic
from nucleon.linalg.kernels import triton_works

HALF_ROWS = 64
"""Fewest rows with which float16 pays, and its noise, which falls as 1/√m, is small enough."""
HALF_STEPS = 5
"""Steps of the float16 recursion: with four no step is left to make up for the 15 % of room after
its restart, and with six ‖P‖_op reaches 1.04 by rounding."""
HALF_ENTRIES = 2**31
"""A matrix has fewer: the kernels' offsets in it have 32 bits."""


@lru_cache(maxsize=4096)  # called in every step
def method_for(
    method: str, iterations: int, m: int, n: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Return the method for m×n matrices; "auto" depends on the device.

    It is "half" on CUDA with Triton, unless the weights are float64, a side is below 64, a matrix
    has 2³¹ entries or more, or `iterations` is not 5; "polar-express" otherwise.
    """
    small = m * n < HALF_ENTRIES
    if method == "half" and not small:
        raise ValueError(f"method='half' is for matrices below {m}×{n}; pass method='auto'")
    if method != "auto":
        return method
    fits = min(m, n) >= HALF_ROWS and small and iterations == HALF_STEPS
    fast = device.type == "cuda" and dtype != torch.float64 and triton_works()
    return "half" if fits and fast else "polar-express"


def chosen_method(
    group: Mapping[str, Any], m: int, n: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Return the method of a group for m×n matrices; "coefficients" if it has its own."""
    if group.get("coefficients") is not None:
        return "coefficients"
    return method_for(group.get("method", "auto"), group["iterations"], m, n, device, dtype)


def check_coefficients(group: Mapping[str, Any]) -> None:
    """Check the coefficients of a group beside its `method` and `iterations`."""
    triples, iterations = coefficients.custom(group["coefficients"]), group["iterations"]
    if group["method"] != "auto" or len(triples) > iterations:
        raise ValueError(
            f"coefficients with {len(triples)} triples need method='auto' and as many iterations "
            f"at least, got method={group['method']!r} and iterations={iterations!r}"
        )


def check_method(group: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Check that the method of a group is among `methods`, and its iterations."""
    _checks.choice("method", group["method"], methods)
    if group["method"] == "half" and group["iterations"] != HALF_STEPS:
        raise ValueError(
            f"method='half' takes {HALF_STEPS} iterations, got {group['iterations']!r}; "
            f"pass method='polar-express' or iterations={HALF_STEPS}"
        )


@lru_cache
def polynomials(method: str, iterations: int) -> tuple[Quintic, ...]:
    """Return the odd polynomials of a method.

    Their composition maps [0, 1] into itself but for "muon".
    """
    if method == "muon":
        return (coefficients.muon(),) * iterations
    if method == "half":
        return coefficients.half_polar_express(iterations)
    bound = coefficients.bound_for("polar-express", iterations)
    return coefficients.quintics(method, bound, iterations)
