"""Regret certificates of a training run, from what `engines.ledger` keeps of each matrix."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg._precision import exact
from nucleon.linalg.norms import nuclear_norm
from nucleon.online import theory
from nucleon.online.regret import Certificate
from nucleon.optim.engines.ledger import changes_of, tolerance
from nucleon.optim.engines.ranks import placement, wire
from nucleon.optim.engines.work import HasDirection, State, facts_of, gram_discount
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import Infos, blocks
from nucleon.optim.matrices.stacks import gram_key


def collect(
    method: HasDirection,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Tensor, State],
    infos: Infos,
) -> dict[str, Certificate]:
    """A certificate for each parameter of the groups with certify=True, by name; synchronizes."""
    mine = {
        infos[param].name: _certificate(method, states[param], group, blocks(param, spec))
        for group in groups
        if group["certify"] and group["rule"] == "matrix"
        for param in group["params"]
        if param.numel() and "played" in states.get(param, {})
        for spec in [infos[param].axes]
    }
    return wire.merged(mine, "certificates") if placement.spread(groups) else mine


class Recorded(Protocol):
    """An optimizer that keeps its regret."""

    name: ClassVar[str]
    param_groups: list[dict[str, Any]]
    state: Any

    def certificates(self) -> dict[str, Certificate]:
        """By name of the parameter."""
        ...

    def register_step_post_hook(self, hook: Any) -> Any:
        """As torch's optimizers have it."""
        ...


class CertificateLog:
    """Certificates every N steps of a run, kept by a step hook: rows (step, {name: certificate}).

    Each step waits for the device to read its number. Copies of the optimizer have no such hook.

    Args:
        optimizer: with certify=True in some group.
        every: N, how many steps pass between two rows; each costs a nuclear norm per matrix (100).
    """

    def __init__(self, optimizer: Recorded, every: int = 100) -> None:
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
        groups = [g for g in optimizer.param_groups if g["certify"]]
        states = [optimizer.state.get(p, {}) for g in groups for p in g["params"]]
        step = next(int(own["step"]) for own in states if "step" in own)  # what is frozen has none
        if step % self.every == 0:
            self.rows.append((step, optimizer.certificates()))


def _certificate(
    method: HasDirection, state: State, group: Mapping[str, Any], found: Sequence[Block]
) -> Certificate:
    norms = [nuclear_norm(block.matrices(exact(state["total"]))) for block in found]
    regret = exact(state["loss"]) + torch.cat(norms)
    refusal = facts_of(method).refusal or _refusal(group) or _outside(state, group)
    bound = torch.cat([_bound(method, state, group, block) for block in found])
    if refusal is None and not bound.isfinite().all():
        refusal = "no theorem has a finite bound on this game"
    place = "cpu" if group["placement"] == "owner" else bound.device  # they travel between ranks
    lower = None
    if method.has_gram:  # √(Tr M̂/2)
        grams = [exact(state[gram_key(block)]) for block in found]
        squares = torch.cat([gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in grams])
        lower = (squares / 2).sqrt().to(place)
    return Certificate(
        regret=regret.to(place),
        bound=bound.to(place),
        theorem=facts_of(method).theorem,
        conditional_on=_conditions(method, group, state["loss"].dtype),
        refusal=refusal,
        lower=lower,
    )


def _bound(
    method: HasDirection,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    block: Block,
) -> Tensor:
    m, n = sorted((block.rows, block.columns))
    constants = facts_of(method).constants
    admissible = constants and constants(group, m, n)
    mine = slice(block.first, block.first + block.count)
    first, excess = exact(state["first"])[mine], exact(state["excess"])[mine]
    bound, smooths = group.get("gradient_bound"), method.smoothing_scale(group, m, n)
    if admissible is None or not bound or not smooths:
        return torch.full_like(first, torch.inf)
    eta = smooths**-0.5
    return theory.gbpa_bound(
        state[gram_key(block)],  # in its own dtype, whose rounding is allowed for
        radius=1.0,
        gradient_bound=bound,
        alpha=admissible.alpha,
        beta=admissible.beta,
        # √m‖G_1‖_F ≥ ‖G_1‖_*, discounted already; its factor 1 − βη is negative for larger η.
        first_nuclear=first if admissible.beta * eta < 1 else 0.0,
        discount=group["momentum"],
        rounds=1,
        eta=eta,
        excess=excess,
    )


def _conditions(
    method: HasDirection, group: Mapping[str, Any], kept: torch.dtype
) -> tuple[str, ...]:
    conditions = ["skipped steps do not count"]
    if group["momentum_dtype"] == torch.bfloat16:
        conditions.append("rounding Ĝ to bfloat16 does not matter")
    if kept != torch.float64:  # the device has no wider type
        conditions.append("rounding the losses to float32 does not matter")
    facts = facts_of(method)
    if facts.kernel is None:  # a direction of the user's own
        if facts.refusal is None:  # and with it a theorem, which is taken on trust
            conditions.append(f"the theorem of {type(method).__name__} is true of its direction")
    elif (chosen := group.get("method", "auto")) not in ("eigh", "svd"):
        conditions.append(f"the iterations of method={chosen!r} have converged")
    return tuple(conditions)


def _refusal(group: Mapping[str, Any]) -> str | None:
    if not group.get("gradient_bound"):
        return "the theorem needs gradient_bound > 0"
    if group["nesterov"]:
        return "the theorem is on the direction of Ĝ; pass nesterov=False"
    if gram_discount(group) != group["momentum"]:
        return "the theorem needs beta2 = momentum²; pass beta2=None"
    if not group.get("smoothing_scale", 1.0):
        return "the theorem needs smoothing_scale > 0"
    changes = changes_of(group["certified"], group)
    if changes == "certify":
        return "certify was switched off for some steps, and the regret lacks them"
    return f"{changes} changed during the run" if changes else None


def _outside(state: State, group: Mapping[str, Any]) -> str | None:
    count = int(state["outside"].max()) if state["outside"].numel() else 0
    allowed = tolerance(group, _checks.work_dtype(state["played"].dtype))
    if not count:
        return None
    return f"{count} actions had a norm above {1 + allowed:g}, outside the ball of radius 1"
