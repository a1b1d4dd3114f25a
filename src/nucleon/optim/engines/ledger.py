"""What a regret certificate needs of a run, kept with each matrix: one game per matrix.

At step t the action is X_t = −P_{t-1}, X_1 = 0, of radius one, and the discounted regret is

    Reg_t = Σ_s γ^{t-s}⟨G_s, X_s⟩ + ‖Ĝ_t‖_*,   γ = momentum

The sum is kept here; the nuclear norm is computed when a certificate is asked for.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from nucleon._files import to_json
from nucleon.linalg._precision import widest
from nucleon.linalg.norms import operator_norm_bound
from nucleon.online.regret import PROMISE
from nucleon.optim.engines.work import Matrices
from nucleon.optim.matrices import shards


def new_state(param: Tensor, matrices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The last direction of a parameter, and four numbers per matrix.

    `loss`: Σγ^{t-s}⟨G_s, X_s⟩. `excess`: at least Σγ^{t-s}‖E_s‖_*, E_s what of G_s is above the
    `gradient_bound`. `first`: γ^{t-1}√m‖G_1‖_F ≥ γ^{t-1}‖G_1‖_*. `outside`: actions off the ball.
    """
    zeros = torch.zeros(matrices, dtype=widest(param.device), device=param.device)
    return {
        "played": shards.zeros(param, dtype),
        "loss": zeros,
        "excess": zeros.clone(),
        "first": zeros.clone(),
        "outside": torch.zeros_like(zeros, dtype=torch.int64),
    }


def record(work: Matrices, gradient: Tensor, direction: Tensor, taken: Tensor) -> None:
    """Enter one round of every matrix of a stack, the skipped ones excepted; no synchronization."""
    stack, states = work.stack, work.states
    hyper, wide = work.hyperparameters, widest(gradient.device)
    old = {
        name: stack.gather_own(s[name] for s in states)
        for name in ("loss", "excess", "first", "outside")
    }
    played = stack.gather(s["played"] for s in states)
    gradient = gradient.to(wide)  # a norm may leave float32 where its entries do not
    root = math.sqrt(gradient.shape[-2]) * torch.linalg.matrix_norm(gradient)
    # Not 0 once it was more, or a later gradient would be taken for the first.
    faded = (hyper.momentum * old["first"]).clamp_min(torch.finfo(wide).tiny)
    new = {
        "loss": hyper.momentum * old["loss"] - (gradient * played).sum(dim=(-2, -1)),
        "excess": hyper.momentum * old["excess"] + excess(gradient, hyper.gradient_bound, root),
        "first": torch.where(old["first"] > 0, faded, root),
        "outside": old["outside"] + _outside(direction, tolerance(work.group, direction.dtype)),
    }
    for name, value in new.items():
        stack.scatter_own(torch.where(taken, value, old[name]), [s[name] for s in states])
    kept = torch.where(taken[:, None, None], direction, played)
    stack.scatter(kept, [s["played"] for s in states])


def excess(gradient: Tensor, bound: float, root: Tensor) -> Tensor:
    """At least ‖E‖_*, where G − E has norm at most `bound`; (b,), 0 where G itself has.

    With u ≥ ‖G‖_op both E = G(1 − bound/u) and what of the singular values is above the bound will
    do: min{√m‖G‖_F(1 − bound/u), m(u − bound)}, `root` being √m‖G‖_F. u is `operator_norm_bound`.
    """
    m, eps = gradient.shape[-2], torch.finfo(gradient.dtype).eps
    norm = operator_norm_bound(gradient).to(root.dtype) * (1 + 64 * m * eps)
    above = (norm - bound).clamp_min(0.0)
    share = above / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return torch.minimum(root * share, m * above)


def tolerance(group: Mapping[str, Any], dtype: torch.dtype) -> float:
    """How far outside the ball the method of a group may be, by `docs/promises.md`."""
    if group.get("method") in ("eigh", "svd"):
        return PROMISE[dtype]
    return 1e-2 if group.get("method") in ("auto", "half", "bfloat16") else 1e-3


def _outside(direction: Tensor, allowed: float) -> Tensor:
    """1 where ‖P‖_op > 1 + `allowed`, (b,): then (1 + allowed)²I − PPᵀ has no Cholesky factor."""
    wide = direction.to(widest(direction.device))
    eye = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device)
    info = torch.linalg.cholesky_ex((1 + allowed) ** 2 * eye - wide @ wide.mT).info
    return (info != 0).long()


# ------------------------------------------------------------------ the options of the game

CHANGED = "changed: "
"""How the note on a group begins whose game has ended; then what changed."""


def note(group: dict[str, Any], game: Iterable[str]) -> None:
    """Write down at every step, on every rank, with which of these options its game is played.

    The note is text: empty before the first step, then the options, or what changed.
    """
    told: str = group["certified"]
    if group["certify"]:
        changes = changes_of(told, group)
        group["certified"] = f"{CHANGED}{changes}" if changes else options_of(group, game)
    elif told and not told.startswith(CHANGED):
        group["certified"] = f"{CHANGED}certify"


def options_of(group: Mapping[str, Any], game: Iterable[str]) -> str:
    """The options of the game of a group, as text."""
    return to_json({name: group[name] for name in game if name in group}, default=str)


def is_note(told: object) -> bool:
    """Whether a saved note on a group is one that `note` can have written."""
    if not isinstance(told, str):
        return False
    try:
        return not told or told.startswith(CHANGED) or isinstance(json.loads(told), dict)
    except ValueError:
        return False


def changes_of(told: str, group: Mapping[str, Any]) -> str:
    """Which options are not those of the game, by name; empty where none changed."""
    if not told or told.startswith(CHANGED):
        return told.removeprefix(CHANGED)
    before = json.loads(told, parse_constant=lambda word: str(float(word)))  # of older versions
    now = json.loads(options_of(group, before))
    return ", ".join(name for name in now if before.get(name) != now[name])
