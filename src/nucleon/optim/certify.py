"""Regret certificates of a training run: each matrix is a game that its gradients play.

At step t the action is X_t = −P_{t-1}, X_1 = 0, of radius one, and the discounted regret is

    Reg_t = Σ_s γ^{t-s}⟨G_s, X_s⟩ + ‖Ĝ_t‖_*,   γ = momentum

The sum is kept in the optimizer's state; the nuclear norm is computed when a certificate is asked
for.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nucleon import _checks, theory
from nucleon.linalg._precision import exact, widest
from nucleon.linalg.norms import nuclear_norm, operator_norm_bound
from nucleon.optim import placement, shards
from nucleon.optim.axes import Block
from nucleon.optim.stacks import Stack, blocks, gram_key, parameter_names
from nucleon.regret import Certificate

if TYPE_CHECKING:
    from nucleon.optim.base import MatrixOptimizer


_USED = ("momentum", "beta2", "nesterov", "smoothing_scale", "gradient_bound")
"""The options that the theorem's game is made of: a change of one ends it."""


def new_state(param: Tensor, matrices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a certificate needs of a parameter: the last direction, and three numbers a matrix."""
    zeros = torch.zeros(matrices, dtype=widest(param.device), device=param.device)
    return {
        "played": shards.zeros(param, dtype),
        "loss": zeros,
        "largest": zeros.clone(),
        "first": zeros.clone(),
    }


def note(group: dict[str, Any]) -> None:
    """Keep the options of the game with its group, on every rank; None once they have changed."""
    used = [group[name] for name in _USED if name in group]
    group["certified"] = used if group["certified"] in ((), used) else None


def record(
    stack: Stack,
    states: list[dict[str, Tensor]],
    gradient: Tensor,
    direction: Tensor,
    finite: Tensor,
    group: dict[str, Any],
) -> None:
    """Enter one round of every matrix of a stack, the skipped ones excepted; no sync."""
    discount: float = group["momentum"]
    played = stack.gather((s["played"] for s in states), gradient.dtype)
    wide = widest(gradient.device)
    loss = -(gradient.to(wide) * played).sum(dim=(-2, -1))
    norm = operator_norm_bound(gradient).to(wide)
    frobenius = torch.linalg.matrix_norm(gradient).to(wide) * math.sqrt(gradient.shape[-2])
    for name, new in (("loss", loss), ("largest", norm), ("first", frobenius)):
        old = stack.gather_own(s[name] for s in states)
        if name == "loss":
            new = discount * old + new
        elif name == "largest":
            new = torch.maximum(old, new)
        else:
            new = torch.where(old > 0, discount * old, new)
        stack.scatter_own(torch.where(finite, new, old), [s[name] for s in states])
    kept = torch.where(finite[:, None, None], direction, played)
    stack.scatter(kept, [s["played"] for s in states])


def certificates(optimizer: "MatrixOptimizer") -> dict[str, Certificate]:
    """A certificate for each parameter of the groups with certify=True, by name; synchronizes."""
    names = parameter_names(optimizer.param_groups)
    mine = {
        names[param]: _certificate(optimizer, param, spec, group)
        for group in optimizer.param_groups
        if group["certify"] and group["rule"] == "matrix"
        for param, spec in zip(group["params"], group["axes"], strict=True)
        if param.numel() and "played" in optimizer.state[param]
    }
    return placement.of_all_ranks(mine, optimizer.param_groups)


class CertificateLog:
    """Certificates every N steps of a run, kept by a step hook: rows (step, {name: certificate}).

    Each step waits for the device to read its number. Copies of the optimizer have no such hook.

    Args:
        optimizer: with certify=True in some group.
        every: N, how many steps pass between two rows; each costs a nuclear norm a matrix (100).
    """

    def __init__(self, optimizer: "MatrixOptimizer", every: int = 100) -> None:
        self.every = _checks.count("every", every)
        if not any(group["certify"] for group in optimizer.param_groups):
            raise ValueError(
                f"no parameter group keeps its regret; pass certify=True to {optimizer.name}"
            )
        self.rows: list[tuple[int, dict[str, Certificate]]] = []
        self._handle = optimizer.register_step_post_hook(self._record)

    def remove(self) -> None:
        """Stop recording."""
        self._handle.remove()

    def _record(self, optimizer: Any, *_: object) -> None:
        group = next(g for g in optimizer.param_groups if g["certify"] and g["params"])
        step = int(optimizer.state[group["params"][0]]["step"])
        if step % self.every == 0:
            self.rows.append((step, certificates(optimizer)))


def _certificate(
    optimizer: "MatrixOptimizer", param: Tensor, spec: str | None, group: Mapping[str, Any]
) -> Certificate:
    state: dict[str, Tensor] = optimizer.state[param]
    found = blocks(param, spec)
    norms = [nuclear_norm(block.matrices(exact(state["total"]))) for block in found]
    regret = exact(state["loss"]) + torch.cat(norms)
    largest = state["largest"].max().item()
    bound = torch.cat([_bound(optimizer, state, group, block) for block in found])
    place = "cpu" if group["placement"] == "owner" else bound.device  # they travel between ranks
    return Certificate(
        regret=regret.to(place),
        bound=bound.to(place),
        theorem=optimizer.theorem,
        conditional_on=_conditions(group, state["loss"].dtype),
        refusal=optimizer.uncertified or _refusal(group, largest),
    )


def _bound(
    optimizer: "MatrixOptimizer",
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    block: Block,
) -> Tensor:
    m, n = sorted((block.rows, block.columns))
    constants = optimizer.admissibility(group, m, n)
    first = exact(state["first"])[block.first : block.first + block.count]
    if (
        constants is None
        or not group["gradient_bound"]
        or not optimizer.smoothing_scale(group, m, n)
    ):
        return torch.full_like(first, torch.inf)
    eta = optimizer.smoothing_scale(group, m, n) ** -0.5
    return theory.gbpa_bound(
        state[gram_key(block)],  # in its own dtype, whose rounding is allowed for
        radius=1.0,
        gradient_bound=group["gradient_bound"],
        alpha=constants.alpha,
        beta=constants.beta,
        # √m‖G_1‖_F ≥ ‖G_1‖_*, discounted already; its factor 1 − βη is negative for larger η.
        first_nuclear=first if constants.beta * eta < 1 else 0.0,
        discount=group["momentum"],
        rounds=1,
        eta=eta,
    )


def _conditions(group: Mapping[str, Any], kept: torch.dtype) -> tuple[str, ...]:
    conditions = ["skipped steps do not count"]
    if group["momentum_dtype"] == torch.bfloat16:
        conditions.append("rounding Ĝ to bfloat16 does not matter")
    if kept != torch.float64:  # the device has no wider type
        conditions.append("rounding the losses to float32 does not matter")
    if group["method"] not in ("eigh", "svd"):
        conditions.append(f"method={group['method']!r} is as good as exact")
    return tuple(conditions)


def _refusal(group: Mapping[str, Any], largest: float) -> str | None:
    if not group["gradient_bound"]:
        return "the theorem needs gradient_bound > 0"
    if group["nesterov"]:
        return "the theorem is on the direction of Ĝ; pass nesterov=False"
    if group["beta2"] is not None and group["beta2"] != group["momentum"] ** 2:
        return "the theorem needs beta2 = momentum²; pass beta2=None"
    if not group["smoothing_scale"]:
        return "the theorem needs smoothing_scale > 0"
    if group["certified"] is None:
        return f"one of {', '.join(_USED)} changed during the run"
    if largest > group["gradient_bound"] * (1 + 1e-3):  # what the norm's upper bound may add
        return f"a gradient of norm {largest:.6g} exceeded the gradient_bound"
    return None
