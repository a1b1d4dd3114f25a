"""What a regret certificate needs of a run, kept with each matrix: one game per matrix.

At step t the action is X_t = −P_{t-1}, X_1 = 0, of radius one, and the discounted regret is

    Reg_t = Σ_s γ^{t-s}⟨G_s, X_s⟩ + ‖Ĝ_t‖_*,   γ = momentum

The sum is kept here; the nuclear norm is computed when a certificate is asked for.
"""

import math

import torch
from torch import Tensor

from nucleon.linalg._precision import widest
from nucleon.linalg.norms import operator_norm_bound
from nucleon.optim.engines.work import Matrices
from nucleon.optim.matrices import shards


def new_state(param: Tensor, matrices: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The last direction of a parameter, and three numbers per matrix."""
    zeros = torch.zeros(matrices, dtype=widest(param.device), device=param.device)
    return {
        "played": shards.zeros(param, dtype),
        "loss": zeros,
        "largest": zeros.clone(),
        "first": zeros.clone(),
    }


def record(work: Matrices, gradient: Tensor, direction: Tensor, taken: Tensor) -> None:
    """Enter one round of every matrix of a stack, the skipped ones excepted; no synchronization."""
    stack, states = work.stack, work.states
    discount = work.hyperparameters.momentum
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
        stack.scatter_own(torch.where(taken, new, old), [s[name] for s in states])
    kept = torch.where(taken[:, None, None], direction, played)
    stack.scatter(kept, [s["played"] for s in states])
