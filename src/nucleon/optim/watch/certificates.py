"""Regret certificates of a training run, from the sums of `engines.ledger`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import certificate
from nucleon.certificate import Certificate
from nucleon.linalg._precision import exact
from nucleon.linalg.norms import nuclear_norm
from nucleon.optim.engines.ledger import PREFIX, tolerance
from nucleon.optim.engines.ranks import placement
from nucleon.optim.engines.work import HasDirection, State, facts_of, gram_discount
from nucleon.optim.matrices.axes import Block
from nucleon.optim.matrices.parameters import blocks
from nucleon.optim.matrices.stacks import gram_key


def collect(optimizer: HasDirection) -> dict[str, Certificate]:
    """Return the certificate of each parameter with certify=True, by its name; synchronizes."""
    groups, states, infos = optimizer.param_groups, optimizer.state, optimizer.infos
    mine = {
        infos[param].name: _certificate(
            optimizer, states[param], group, blocks(param, infos[param].axes)
        )
        for group in groups
        if group["certify"] and group["route"] == "matrix"
        for param in group["params"]
        if param.numel() and "ledger.played" in states.get(param, {})
    }
    return placement.merged(mine, groups, "certificates")


def unbounded(optimizer: HasDirection, group: Mapping[str, Any]) -> str | None:
    """Return why no certificate of a group can have a bound; None if all can."""
    if not group["certify"] or group["route"] != "matrix":
        return None
    if (reason := facts_of(optimizer).refusal) is not None:
        return f"no theorem applies to {optimizer.name}, since {reason}"
    if not group.get("gradient_bound"):
        return "pass gradient_bound=G with G ≥ ‖G_t‖_op, which the theorem needs"
    if group["nesterov"] or not group.get("smoothing_scale", 1.0):
        return "pass nesterov=False and smoothing_scale > 0, as the theorem needs"
    if not math.isclose(gram_discount(group), group["momentum"], rel_tol=1e-12):
        return "pass beta2=None for β₂ = β₁², as the theorem needs"
    return None


def _certificate(
    optimizer: HasDirection, state: State, group: Mapping[str, Any], sections: Sequence[Block]
) -> Certificate:
    entries = {k.removeprefix(PREFIX): v for k, v in state.items() if k.startswith(PREFIX)}
    total, grams = exact(entries["total"]), [entries[gram_key(block)] for block in sections]
    norms = torch.cat([nuclear_norm(block.matrices(total)) for block in sections])
    bound = torch.cat([_bound(optimizer, entries, group, block) for block in sections])
    refusal = _refusal(optimizer, entries, group)
    if refusal is None and not bound.isfinite().all():
        refusal = "no theorem has a finite bound on this game"
    measured = {
        "regret": exact(entries["loss"]) + norms,
        "bound": bound,
        "largest": exact(entries["largest"]),
        "excess": 2 * exact(entries["excess"]),
        "gradient_bound": exact(entries["game"])[:, 2],
        "lower": torch.cat([certificate.forced_regret(exact(gram)) for gram in grams]),
    }
    if group["placement"] == "owner":  # they are sent between ranks
        measured = {name: value.cpu() for name, value in measured.items()}
    theorem = "none" if entries["began"].any() else facts_of(optimizer).theorem
    skipped = int(state["skipped"].sum())
    return Certificate(theorem=theorem, refusal=refusal, skipped=skipped, **measured)


def _bound(
    optimizer: HasDirection, entries: Mapping[str, Tensor], group: Mapping[str, Any], block: Block
) -> Tensor:
    """Return the theorem's bound of each matrix of a section, by the options of its steps."""
    m, n = sorted((block.rows, block.columns))
    mine = slice(block.first, block.first + block.count)
    gram = entries[gram_key(block)]  # in its own dtype, for whose rounding the check allows
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


def _refusal(
    optimizer: HasDirection, entries: Mapping[str, Tensor], group: Mapping[str, Any]
) -> str | None:
    """Return why no theorem bounds the regret of a parameter; None if one does."""
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
