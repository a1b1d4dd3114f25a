"""The exact regret of a game, and its terms by Lemma 3.1."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.linalg.augmented import PROMISE
from nucleon.linalg.norms import nuclear_norm, operator_norm, surely_within
from nucleon.online import theory
from nucleon.online.potentials import Gaussian, Potential, Regularized

Shape = tuple[int, ...]


class Ledger:
    """Reg_T = Σ_t γ^{T-t}⟨G_t, X_t⟩ + D‖Ĝ_T‖_*, exact and incremental.

    The second term is −min_{‖X‖_op ≤ D} ⟨Ĝ_T, X⟩, the best fixed action in hindsight; its nuclear
    norm is computed only when `regret` asks for it. Sums are float64 whatever the game's dtype, and
    are replaced, never written to: a copy of a ledger is a record of its round.

    Args:
        shape: (m, n), or (b, m, n) for b games.
        radius: D (default 1.0).
        discount: γ in (0, 1]; 1.0 is the plain regret (default).
        device: of the sums (default: torch's).
    """

    def __init__(
        self,
        shape: Shape,
        *,
        radius: float = 1.0,
        discount: float = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        self.shape = game_shape(shape)
        self.radius = _checks.positive("radius", radius)
        self.discount = _checks.fraction("discount", discount, closed="1")
        self.rounds = 0
        self.oblivious = True
        """True until a gradient comes that may depend on the actions."""
        short = min(self.shape[-2:])
        self.total = torch.zeros(self.shape, dtype=torch.float64, device=device)
        """Ĝ_T = Σγ^{T-t}G_t."""
        self.gram = self.total.new_zeros(*self.shape[:-2], short, short)
        """M̂_T = Σγ^{2(T-t)}G_tG_tᵀ, on the short side."""
        self.loss = self.total.new_zeros(self.shape[:-2])
        """Σγ^{T-t}⟨G_t, X_t⟩."""
        self.largest = torch.zeros_like(self.loss)
        """max‖G_t‖_op."""
        self.outside = torch.zeros_like(self.loss)
        """The largest ‖X_t‖ of an action outside the ball by more than `PROMISE`, 0 without one."""

    @torch.no_grad()
    def record(self, gradient: Tensor, action: Tensor, *, oblivious: bool = False) -> None:
        """Enter the round (G_t, X_t), two tensors of the ledger's shape; on an error, do nothing.

        Args:
            gradient: G_t.
            action: X_t.
            oblivious: True if G_t was fixed before the game (default False).
        """
        for name, tensor in (("gradient", gradient), ("action", action)):
            if tuple(tensor.shape) != self.shape:
                raise ValueError(
                    f"{name} must have the ledger's shape {self.shape}, got {tuple(tensor.shape)}"
                )
        gradient = gradient.double()
        loss = self.discount * self.loss + (gradient * action).sum((-2, -1))
        total = moments.accumulate_total(self.total, gradient, self.discount)
        wide = gradient if self.shape[-2] <= self.shape[-1] else gradient.mT
        gram = moments.accumulate_gram(self.gram, wide, self.discount)
        # ‖Ĝ‖_* is at most the sum of the entries, so a finite bound leaves a finite regret; a NaN
        # or infinite entry of either tensor shows in one of the sums.
        bound = loss.abs() + self.radius * total.abs().sum((-2, -1))
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        _checks.finite("the regret and the Gram matrix with this gradient", bound + trace)
        if not surely_within(gradient, self.largest):
            self.largest = torch.maximum(self.largest, operator_norm(gradient))
        limit = (1 + PROMISE[action.dtype]) * self.radius
        if not surely_within(action, limit):
            norm = self.norm(action).to(self.outside)
            beyond = torch.where(norm > limit, norm, 0.0)
            self.outside = torch.maximum(self.outside, beyond)
        self.total, self.loss, self.rounds = total, loss, self.rounds + 1
        self.gram, self.oblivious = gram, self.oblivious and oblivious

    def regret(self) -> Tensor:
        """Return Reg_T of every game, shape () or (b,)."""
        return self.loss + self.radius * nuclear_norm(self.total)

    def norm(self, action: Tensor) -> Tensor:
        """Return ‖X‖ in the norm of the ball, at most ‖X‖_op, float64, () or (b,)."""
        return operator_norm(action).double()

    def tensors(self) -> dict[str, Tensor]:
        """Return all sums and counts by name, as tensors."""
        counts = {"rounds": torch.tensor(self.rounds), "oblivious": torch.tensor(self.oblivious)}
        return counts | {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from the `tensors` of a ledger of the same shape, radius and discount."""
        vars(self).update(tensors)
        self.rounds, self.oblivious = int(tensors["rounds"]), bool(tensors["oblivious"])


class BoxLedger(Ledger):
    """Reg_T = Σ⟨g_t, x_t⟩ + D‖Σg_t‖₁, the regret on the ball ‖x‖_∞ ≤ D; arguments as `Ledger`."""

    def regret(self) -> Tensor:
        """Return Reg_T of every game, shape () or (b,)."""
        return self.loss + self.radius * self.total.abs().sum((-2, -1))

    def norm(self, action: Tensor) -> Tensor:
        """Return ‖x‖_∞, float64, () or (b,)."""
        return action.abs().amax((-2, -1)).double()


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Lemma 3.1: Reg_T = underestimation + Σ bregman + Σ stability + first_round.

    The sum telescopes for any numbers Ψ_t; what can fail is that the actions are −D times the
    derivatives of these Ψ_t, which makes `mismatch` zero, and that each term is within its bound.
    All terms carry D and their discount. Tensors of one entry per round are (T-1, …), others (…).
    """

    regret: Tensor
    """Σ γ^{T-t}⟨G_t, X_t⟩ + D‖Ĝ_T‖_*, from the actions."""
    underestimation: Tensor
    """D(‖Ĝ_T‖_* − Ψ_T(Ĝ_T)); dominance bounds it by 0."""
    bregman: Tensor
    """D·B(S_t + G_{t+1}‖S_t) of Ψ_t, one term per round, from values and their autograd."""
    bregman_bound: Tensor
    """D·β/2·Tr GᵀΛ^{-1/2}G."""
    stability: Tensor
    """D(Ψ_{t+1}(S_{t+1}) − Ψ_t(S_{t+1})), one term per round."""
    stability_bound: Tensor
    """D·α(Tr√Λ_{t+1} − Tr√Λ_t)."""
    first_round: Tensor
    """D·Ψ_1(G_1)."""
    first_round_bound: Tensor
    """D(‖G_1‖_* + α Tr√Λ_1)."""
    gap: Tensor
    """D times the largest duality gap of a value: what a solver may add to any term."""

    @property
    def total(self) -> Tensor:
        """The sum of the terms."""
        rounds = self.bregman.sum(0) + self.stability.sum(0)
        return self.underestimation + rounds + self.first_round

    @property
    def mismatch(self) -> Tensor:
        """Regret − total = Σ⟨G_t, X_t + D∇Ψ⟩, zero where the actions are the derivatives."""
        return self.regret - self.total

    @property
    def excess(self) -> dict[str, Tensor]:
        """The most by which a term of each kind exceeds its bound: at most `gap` if all holds."""
        return {
            "underestimation": self.underestimation.amax(),
            "bregman": (self.bregman - self.bregman_bound).amax(),
            "stability": (self.stability - self.stability_bound).amax(),
            "first_round": (self.first_round - self.first_round_bound).amax(),
        }


def decompose(
    potential: Potential,
    gradients: Tensor,
    actions: Tensor,
    *,
    radius: float = 1.0,
    gradient_bound: float = 1.0,
    eta: float | None = None,
    discount: float = 1.0,
    stream: int = 0,
) -> Decomposition:
    """Return Lemma 3.1's terms of a recorded game, in float64.

    The discounted game is the plain one on γ^{-t}G_t, times γ^T. Its round t is computed on γ^t of
    that, which a homogeneous potential allows, so that no number overflows. A random potential uses
    one Z in all rounds: its terms stay within their bounds in the mean, and the actions must come
    from that Z (FTPL with redraw=False).

    Args:
        potential: Ψ.
        gradients: G_1 … G_T, (T, …, m, n) with T ≥ 2; tall ones are transposed.
        actions: X_1 … X_T, of the same shape.
        radius: D (default 1.0).
        gradient_bound: G (default 1.0).
        eta: η; None is √(α/β) of the potential, 1 where it has none.
        discount: γ (default 1.0).
        stream: of FTPL's noise, as the learner had it (default 0).
    """
    gradients, actions = _checks.matrix("gradients", gradients), _checks.matrix("actions", actions)
    if gradients.ndim < 3 or gradients.shape != actions.shape or len(gradients) < 2:
        raise ValueError(
            f"gradients and actions must both be (T, …, m, n) with T ≥ 2, got "
            f"{tuple(gradients.shape)} and {tuple(actions.shape)}; use torch.stack"
        )
    if gradients.shape[-2] > gradients.shape[-1]:
        gradients, actions = gradients.mT, actions.mT
    rounds, *batch, rows, columns = gradients.shape
    constants = potential.admissibility(rows, columns)
    if eta is None:
        eta = 1.0 if constants is None else constants.eta

    device = gradients.device
    gradients, actions = gradients.double(), actions.double()
    totals, grams = torch.empty_like(gradients), gradients.new_empty(rounds, *batch, rows, rows)
    total, gram = torch.zeros_like(gradients[0]), torch.zeros_like(grams[0])
    for t, gradient in enumerate(gradients):
        total = totals[t] = moments.accumulate_total(total, gradient, discount)
        gram = grams[t] = moments.accumulate_gram(gram, gradient, discount)
    smoothings = moments.smoothing(grams, gradient_bound=gradient_bound, eta=eta, discount=discount)
    steps = gradients[1:] / discount
    games = stream + torch.arange(math.prod(batch), device=device).reshape(batch)

    def value(s: Tensor, smoothing: Tensor) -> Tensor:
        if isinstance(potential, Gaussian):
            return potential.value(s, smoothing, stream=games.expand(s.shape[:-2]))
        return potential.value(s, smoothing)

    with torch.enable_grad():
        leaf = totals.requires_grad_()
        values = value(leaf, smoothings)  # Ψ_t(S_t)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    totals, values = totals.detach(), values.detach()
    ahead = value(totals[1:] / discount, smoothings[:-1])  # Ψ_t(S_{t+1})
    bregman = ahead - values[:-1] - (slopes[:-1] * steps).sum((-2, -1))
    bregman_bound = stability_bound = torch.full_like(bregman, torch.inf)
    first_bound = torch.full_like(values[0], torch.inf)
    if constants is not None:
        alpha, beta = constants.alpha, constants.beta
        bregman_bound = theory.bregman_bound(steps, smoothings[:-1], beta=beta)
        after = smoothings[1:] / discount**2
        stability_bound = theory.stability_bound(smoothings[:-1], after, alpha=alpha)
        start = theory.stability_bound(torch.zeros_like(gram), smoothings[0], alpha=alpha)
        first_bound = nuclear_norm(gradients[0]) + start
    gap = torch.zeros((), dtype=torch.float64, device=device)
    if isinstance(potential, Regularized):
        for s, smoothing in ((totals, smoothings), (totals[1:] / discount, smoothings[:-1])):
            gap = torch.maximum(gap, potential.solve(s, smoothing).frank_wolfe_gap.amax())
    best, age = nuclear_norm(totals[-1]), rounds - torch.arange(1, rounds + 1, device=device)
    weights = radius * discount ** age.double().reshape(-1, *(1 for _ in batch))
    loss = (weights * (gradients * actions).sum((-2, -1))).sum(0) / radius
    each, oldest = weights[:-1], radius * discount ** (rounds - 1)
    return Decomposition(
        regret=loss + radius * best,
        underestimation=radius * (best - values[-1]),
        bregman=each * bregman,
        bregman_bound=each * bregman_bound,
        stability=each * (values[1:] / discount - ahead),
        stability_bound=each * stability_bound,
        first_round=oldest * values[0],
        first_round_bound=oldest * first_bound,
        gap=radius / discount * gap,
    )


def game_shape(shape: Shape) -> Shape:
    """Return `shape` as a tuple if it is (m, n), or (b, m, n) for b games."""
    shape = tuple(shape)
    if len(shape) not in (2, 3):
        raise ValueError(f"shape must be (m, n) or (b, m, n), got {shape}")
    for side in shape:
        _checks.count("every side of shape", side)
    return shape
