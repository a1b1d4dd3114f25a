"""The sums of a run from which a regret certificate is computed; each matrix is a game.

At step t the action is X_t = −P_{t-1}, X_1 = 0, of radius one, and the discounted regret is

    Reg_t = Σ_s γ^{t-s}⟨G_s, X_s⟩ + ‖Σ_s γ^{t-s}G_s‖_*,   γ = momentum

The sums are separate from Ĝ and M̂: of the raw gradients and of P as it was applied, in the widest
dtype of the device. Fading, rounding and edits of Ĝ and M̂ change the actions, not the measurement.
The nuclear norm is computed with the certificate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nucleon import moments
from nucleon.linalg._precision import widest
from nucleon.linalg.augmented import PROMISE
from nucleon.linalg.norms import operator_norm_bound
from nucleon.optim.engines.work import Matrices, Settings, State
from nucleon.optim.matrices import shards, stacks
from nucleon.optim.matrices.axes import Block

PREFIX = "ledger."
"""Prefix of the keys of a ledger's tensors in the state of a parameter."""
_SUMS = ("loss", "first", "excess", "largest")
_COUNTS = ("rounds", "outside", "began")
_NUMBERS = (*_SUMS, *_COUNTS)
_SHAPED = ("played", "total")


def new_state(param: Tensor, blocks: tuple[Block, ...]) -> dict[str, Tensor]:
    """Return the empty ledger of a parameter.

    played    P of the last step, shaped like the parameter
    total     Σγ^{t-s}G_s, shaped like the parameter
    gram      Σγ^{2(t-s)}G_sG_sᵀ, short side first, as the state of the optimizer has M̂
    loss      Σγ^{t-s}⟨G_s, X_s⟩
    first     γ^{t-1}‖G_1‖_F of the first gradient that is not zero, 0 before
    excess    at least Σγ^{t-s}‖E_s‖_*, E_s the part of G_s above the `gradient_bound` of its step
    largest   at least max‖G_s‖_op
    game      γ, c and G of the rounds; c is 0 under options that no theorem covers
    rounds    the rounds entered, s = 1 … t
    outside   the actions outside the ball by more than the promise of the method
    began     the step at which a change of γ, c or G restarted the sums; 0: they began at zero
    """
    wide, device = widest(param.device), param.device
    count = sum(block.count for block in blocks)
    zeros = torch.zeros(count, dtype=wide, device=device)
    state = {name: zeros.clone() for name in _SUMS}
    state |= {name: zeros.long() for name in _COUNTS}
    state |= {"game": zeros.new_zeros(count, 3)}
    state |= {name: shards.zeros(param, wide) for name in ("played", "total")}
    for block in blocks:
        short = min(block.rows, block.columns)
        state[stacks.gram_key(block)] = zeros.new_zeros(block.count, short, short)
    return {PREFIX + name: value for name, value in state.items()}


def record(
    work: Matrices, settings: Settings, gradient: Tensor, direction: Tensor, stepped: Tensor
) -> None:
    """Add a round to the sums of every matrix that is not skipped; no synchronization.

    G and P are (b, m, n), G zero for skipped matrices; `stepped`, (b,), is True for the others.
    """
    stack, states, hyper = work.stack, work.states, settings[work.stack.kind]
    wide, allowed = widest(gradient.device), tolerance(settings.group, direction.dtype)
    state = {name: stack.gather_own(_entry(states, name)) for name in (*_NUMBERS, "game")}
    state |= {name: stack.gather(_entry(states, name), wide) for name in _SHAPED}
    state["gram"] = torch.cat(stack.grams(states, PREFIX))
    gradient = gradient.to(wide)
    # P as it is applied to the weights: an owner sends it in `wire_dtype`.
    direction = direction.to(_sent(settings.group) or direction.dtype).to(wide)
    same = math.isclose(hyper.gram_discount, hyper.momentum, rel_tol=1e-12)  # beta2 may be given
    covered = hyper.smoothing if same and not hyper.lookahead else 0.0
    now = (hyper.momentum, covered, hyper.gradient_bound)
    game = torch.stack([torch.full_like(state["loss"], x) for x in now], dim=-1)
    changed = (state["rounds"] > 0) & (game != state["game"]).any(-1)
    old = {name: x.masked_fill(_like(changed, x), 0) for name, x in state.items()}

    # An upper bound of ‖G‖_op, rounding included; 0 for G = 0.
    frobenius, rows = torch.linalg.matrix_norm(gradient), gradient.shape[-2]
    norm = operator_norm_bound(gradient) * (1 + 64 * rows * torch.finfo(wide).eps)
    norm = torch.where((gradient != 0).any(-1).any(-1), norm, 0.0)
    above = _excess(norm, frobenius, hyper.gradient_bound, rows)
    new = {
        "loss": hyper.momentum * old["loss"] - (gradient * state["played"]).sum((-2, -1)),
        "first": torch.where(old["largest"] > 0, hyper.momentum * old["first"], frobenius),
        "excess": hyper.momentum * old["excess"] + above,
        "largest": torch.maximum(old["largest"], norm),
        "rounds": old["rounds"] + 1,
        "outside": old["outside"] + _outside(direction, allowed),
        "began": torch.where(changed, states[0]["step"], state["began"]),
        "game": game,
        "played": direction,
        "total": moments.accumulate_total(old["total"], gradient, hyper.momentum),
        "gram": moments.accumulate_gram(old["gram"], gradient, hyper.momentum),
    }
    new = {name: torch.where(_like(stepped, x), x, state[name]) for name, x in new.items()}
    for name in (*_NUMBERS, "game"):
        stack.scatter_own(new[name], _entry(states, name))
    for name in _SHAPED:
        stack.scatter(new[name], _entry(states, name))
    torch._foreach_copy_(stack.grams(states, PREFIX), new["gram"].split(stack.counts))


def _entry(states: Sequence[State], name: str) -> list[Tensor]:
    return [state[PREFIX + name] for state in states]


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask (b,) with as many dimensions as `x`."""
    return mask.view(-1, *(1 for _ in x.shape[1:]))


def _sent(group: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in which an owner sends P; None if P is not rounded."""
    return group["wire_dtype"] if group["placement"] == "owner" else None


def _excess(norm: Tensor, frobenius: Tensor, bound: float, rows: int) -> Tensor:
    """Return an upper bound of ‖E‖_*, (b,), where ‖G − E‖_op ≤ `bound`; 0 if ‖G‖_op ≤ `bound`.

    With u = `norm` ≥ ‖G‖_op, E may be G(1 − bound/u), or the part of the singular values above the
    bound. The result is min{√m‖G‖_F(1 − bound/u), m(u − bound)}.
    """
    above = (norm - bound).clamp_min(0.0)
    share = above / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return torch.minimum(math.sqrt(rows) * frobenius * share, rows * above)


def tolerance(group: Mapping[str, Any], dtype: torch.dtype) -> float:
    """Return the excess over the ball's radius that `docs/promises.md` allows a group's method."""
    if _sent(group) is not None or group.get("method") in ("auto", "half", "bfloat16"):
        return 1e-2
    return PROMISE[dtype] if group.get("method") in ("eigh", "svd") else 1e-3


def _outside(direction: Tensor, allowed: float) -> Tensor:
    """Return 1 where ‖P‖_op > 1 + `allowed`, (b,), so that (1 + allowed)²I − PPᵀ ⋡ 0."""
    eye = torch.eye(direction.shape[-2], dtype=direction.dtype, device=direction.device)
    info = torch.linalg.cholesky_ex((1 + allowed) ** 2 * eye - direction @ direction.mT).info
    return (info != 0).long()
