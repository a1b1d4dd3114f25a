"""Regret certificates of a training run, from what `engines.ledger` keeps of each matrix."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from nucleon import _checks, certificate
from nucleon.certificate import Certificate
from nucleon.linalg._precision import exact
from nucleon.linalg.norms import nuclear_norm
from nucleon.optim.engines.ledger import PREFIX, tolerance
from nucleon.optim.engines.ranks import placement, wire
from nucleon.optim.engines.work import HasDirection, State, facts_of
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
        if group["certify"] and group["route"] == "matrix"
        for param in group["params"]
        if param.numel() and "ledger.played" in states.get(param, {})
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
    optimizer: HasDirection, state: State, group: Mapping[str, Any], sections: Sequence[Block]
) -> Certificate:
    entries = {k.removeprefix(PREFIX): v for k, v in state.items() if k.startswith(PREFIX)}
    total, grams = exact(entries["total"]), [entries[gram_key(block)] for block in sections]
    norms = torch.cat([nuclear_norm(block.matrices(total)) for block in sections])
    bound = torch.cat([_bound(optimizer, entries, group, block) for block in sections])
    squares = torch.cat([exact(g).diagonal(dim1=-2, dim2=-1).sum(-1) for g in grams])
    refusal = _refusal(optimizer, entries, group)
    if refusal is None and not bound.isfinite().all():
        refusal = "no theorem has a finite bound on this game"
    place = "cpu" if group["placement"] == "owner" else bound.device  # they travel between ranks
    return Certificate(
        regret=(exact(entries["loss"]) + norms).to(place),
        bound=bound.to(place),
        theorem="none" if entries["began"].any() else facts_of(optimizer).theorem,
        conditional_on=_conditions(optimizer, group, entries["loss"].dtype),
        refusal=refusal,
        lower=(squares / 2).sqrt().to(place),
    )


def _bound(
    optimizer: HasDirection, entries: Mapping[str, Tensor], group: Mapping[str, Any], block: Block
) -> Tensor:
    """Return the theorem's bound of each matrix of a section, by the options that were played."""
    m, n = sorted((block.rows, block.columns))
    mine = slice(block.first, block.first + block.count)
    gram = entries[gram_key(block)]  # in its own dtype, whose rounding is allowed for
    first, excess, game = (exact(entries[name])[mine] for name in ("first", "excess", "game"))
    bound = torch.full_like(first, math.inf)
    find = facts_of(optimizer).constants
    constants = None if find is None else find(group, m, n)
    if constants is None:
        return bound
    bound[entries["rounds"][mine] == 0] = 0.0
    for row in game.unique(dim=0):
        discount, smoothing, gradient_bound = row.tolist()
        if not smoothing or not gradient_bound:
            continue
        alike, eta = (game == row).all(-1), smoothing**-0.5
        # ‖G‖_F ≤ ‖G‖_* ≤ √m‖G‖_F; the factor 1 − βη of ‖G_1‖_* is negative for larger η.
        side = math.sqrt(m) if constants.beta * eta < 1 else 1.0
        bound[alike] = certificate.gbpa_bound(
            gram[alike],
            radius=1.0,
            gradient_bound=gradient_bound,
            alpha=constants.alpha,
            beta=constants.beta,
            first_nuclear=side * first[alike],
            discount=discount,
            rounds=1,  # `first` is discounted already
            eta=eta,
            excess=excess[alike],
        )
    return bound


def _conditions(
    optimizer: HasDirection, group: Mapping[str, Any], kept: torch.dtype
) -> tuple[str, ...]:
    conditions = ["skipped steps do not count"]
    if group["momentum_dtype"] == torch.bfloat16:
        conditions.append("rounding Ĝ to bfloat16 does not matter")
    if kept != torch.float64:  # the device has no wider type
        conditions.append("rounding the losses to float32 does not matter")
    facts = facts_of(optimizer)
    if facts.kernel is None:  # a direction of the user's own
        if facts.refusal is None:  # and with it a theorem, which is taken on trust
            conditions.append(f"the theorem of {type(optimizer).__name__} is true of its direction")
    elif (chosen := group.get("method", "auto")) not in ("eigh", "svd"):
        conditions.append(f"the iterations of method={chosen!r} have converged")
    return tuple(conditions)


def _refusal(
    optimizer: HasDirection, entries: Mapping[str, Tensor], group: Mapping[str, Any]
) -> str | None:
    """Return why no theorem bounds the regret of a parameter; None where one does."""
    if (reason := facts_of(optimizer).refusal) is not None:
        return reason
    _, smoothing, gradient_bound = entries["game"][entries["rounds"] > 0].unbind(-1)
    if (gradient_bound == 0).any():
        return "the theorem needs gradient_bound > 0"
    if (smoothing == 0).any():
        return "the theorem needs smoothing_scale > 0, nesterov=False and beta2=None"
    if began := int(entries["began"].max()):
        return (
            f"momentum, smoothing_scale or gradient_bound changed at step {began}, where this "
            f"measurement began; the theorem starts from zero sums"
        )
    if outside := int(entries["outside"].max()):
        allowed = tolerance(group, exact(entries["played"]).dtype)
        return f"{outside} actions had a norm above {1 + allowed:g}, outside the ball of radius 1"
    return None
