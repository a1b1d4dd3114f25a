"""Regret as it is, and the terms it is made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nucleon import _checks, moments
from nucleon.certificate import PROMISE
from nucleon.linalg.norms import nuclear_norm, operator_norm
from nucleon.online import theory
from nucleon.online.potentials import Gaussian, Potential, Regularized

Shape = tuple[int, ...]

_EPS = torch.finfo(torch.float64).eps


class Ledger:
    """Reg_T = Σ_t γ^{T-t}⟨G_t, X_t⟩ + D‖Ĝ_T‖_*, exact and incremental.

    The second term is −min_{‖X‖_op ≤ D} ⟨Ĝ_T, X⟩, the best fixed action in hindsight; its nuclear
    norm is computed only when `regret` asks for it. Sums are float64 whatever the game's dtype. The
    ledger also knows which actions were no actions of the game: those outside the ball.

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
        self.total = torch.zeros(self.shape, dtype=torch.float64, device=device)
        self.loss = torch.zeros(self.shape[:-2], dtype=torch.float64, device=device)
        self.length = torch.zeros_like(self.loss)
        """√Σγ^{2(T-t)}‖G_t‖_F²."""
        self.outside = torch.zeros_like(self.loss)
        """The largest ‖X_t‖ of an action outside the ball by more than `PROMISE`, 0 without one."""

    @torch.no_grad()
    def record(self, gradient: Tensor, action: Tensor) -> None:
        """Enter the round (G_t, X_t), two tensors of the ledger's shape; on an error nothing."""
        for name, tensor in (("gradient", gradient), ("action", action)):
            if tuple(tensor.shape) != self.shape:
                raise ValueError(
                    f"{name} must have the ledger's shape {self.shape}, got {tuple(tensor.shape)}"
                )
        gradient = gradient.double()
        loss = self.discount * self.loss + (gradient * action).sum((-2, -1))
        total = moments.accumulate_total(self.total, gradient, self.discount)
        # ‖Ĝ‖_* is at most the sum of the entries, so a finite bound leaves a finite regret; a NaN
        # or infinite entry of either tensor shows in one of the two sums.
        bound = loss.abs() + self.radius * total.abs().sum((-2, -1))
        _checks.finite("the regret with this gradient and action", bound)
        outside = self.outside if self._holds(action) else self._outside(action)
        self.length = torch.hypot(self.discount * self.length, _frobenius(gradient))
        self.total, self.loss, self.outside = total, loss, outside
        self.rounds += 1

    def regret(self) -> Tensor:
        """Reg_T of every game, shape () or (b,)."""
        return self.loss + self.radius * nuclear_norm(self.total)

    def lower(self) -> Tensor:
        """D√(Σγ^{2(T-t)}‖G_t‖_F²/2): with some signs the same gradients cost every learner as much.

        Under independent signs ε_t no learner gains on the average, so that its mean regret is
        D·E‖Σγ^{T-t}ε_tG_t‖_*, at least D times the mean Frobenius norm. That is at least 1/√2 of
        the root of the mean square (Latała and Oleszkiewicz 1994).
        """
        return self.radius * math.sqrt(0.5) * self.length

    def norm(self, action: Tensor) -> Tensor:
        """‖X‖ in the norm of the ball, float64, () or (b,)."""
        return operator_norm(action).double()

    def agrees(self, other: "Ledger", dtype: torch.dtype) -> bool:
        """Whether both hold the same rounds, up to the rounding of actions and sums.

        Each round's loss may differ by eps·‖G_t‖_F‖X_t‖_F, eps that of `dtype`, and by a float64
        rounding per entry and round; Σγ^{T-t}‖G_t‖_F is at most √T times `length`.
        """
        if self._options() != other._options() or self.rounds != other.rounds:
            return False
        total, loss, length = (
            x.to(self.loss.device) for x in (other.total, other.loss, other.length)
        )
        entries, rounds = math.prod(self.shape[-2:]), max(1, self.rounds)
        rounding = 4 * (torch.finfo(dtype).eps + entries * rounds * _EPS)
        size = rounding * math.sqrt(rounds) * torch.maximum(self.length, length)
        reach = self.radius * math.sqrt(entries)
        same = ((self.loss - loss).abs() <= reach * size) & ((self.length - length).abs() <= size)
        return bool(same.all() and ((self.total - total).abs() <= size[..., None, None]).all())

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, as copies: plain values and tensors."""
        sums = {name: getattr(self, name).clone() for name in _SUMS}
        return {**self._options(), "rounds": self.rounds, **sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same shape, radius and discount; refuse any other."""
        of_the_same(state, self._options())
        rounds = saved_count(state, "rounds")
        sums = {name: saved(state, name, getattr(self, name)) for name in _SUMS}
        self.rounds = rounds
        for name, tensor in sums.items():
            setattr(self, name, tensor)

    def _options(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "radius": self.radius, "discount": self.discount}

    def _holds(self, action: Tensor) -> bool:
        """Whether every action is in the ball for certain: (1+tol)²D²I − XXᵀ has a factor."""
        x = action.double() if action.shape[-2] <= action.shape[-1] else action.mT.double()
        limit, rest = (1 + _promise(action)) * self.radius, -(x @ x.mT)
        rest.diagonal(dim1=-2, dim2=-1).add_(limit * limit)  # if ∞, then XXᵀ outside is too
        return not torch.linalg.cholesky_ex(rest).info.any()

    def _outside(self, action: Tensor) -> Tensor:
        """The largest norm outside the ball, with this action."""
        norm = self.norm(action).to(self.outside.device)
        beyond = norm > self.radius * (1 + _promise(action))
        return torch.where(beyond, torch.maximum(self.outside, norm), self.outside)


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
        """The most by which a term of each kind exceeds its bound; right where ≤ `gap`."""
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
    """Lemma 3.1's terms of a recorded game, in float64.

    In the discounted game they are those of the plain one on γ^{-t}G_t, times γ^T; every potential
    is homogeneous, so with Ĝ, Λ̂ the round's terms are γB(Ĝ + G/γ‖Ĝ; Λ̂) and
    Ψ(Ĝ'; Λ̂') − Ψ(Ĝ'; γ²Λ̂). A random potential uses one Z in all rounds: its terms stay within
    their bounds in the mean, and the actions must come from that Z (FTPL with redraw=False).

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
    shape, device = tuple(gradients.shape[1:]), gradients.device
    ledger = Ledger(shape, radius=radius, discount=discount, device=device)
    for gradient, action in zip(gradients, actions, strict=True):
        ledger.record(gradient, action)
    terms = _Terms(potential, shape[-2:], stream, device)
    step = terms.eta if eta is None else _checks.positive("eta", eta)

    def smoothing(gram: Tensor) -> Tensor:
        return moments.smoothing(gram, gradient_bound=gradient_bound, eta=step, discount=discount)

    total = gradients[0].double()
    gram = total @ total.mT
    level = smoothing(gram)
    first = terms.value(total, level)
    first_bound = nuclear_norm(total) + terms.stability_bound(torch.zeros_like(level), level)
    rounds: list[tuple[Tensor, ...]] = []
    for gradient in gradients[1:].double():
        bregman = terms.bregman(total, gradient / discount, level)
        total = moments.accumulate_total(total, gradient, discount)
        gram = moments.accumulate_gram(gram, gradient, discount)
        before, level = discount**2 * level, smoothing(gram)
        change = terms.value(total, level) - terms.value(total, before)
        change_bound = terms.stability_bound(before, level)
        rounds.append((discount * bregman[0], discount * bregman[1], change, change_bound))
    ages = torch.arange(len(rounds) - 1, -1, -1, dtype=torch.float64, device=device)
    weights = radius * discount ** ages.reshape(-1, *(1 for _ in total.shape[:-2]))
    bregman, bregman_bound, stability, stability_bound = (
        weights * torch.stack(term) for term in zip(*rounds, strict=True)
    )
    oldest = radius * discount ** len(rounds)
    return Decomposition(
        regret=ledger.regret(),
        underestimation=radius * (nuclear_norm(total) - terms.value(total, level)),
        bregman=bregman,
        bregman_bound=bregman_bound,
        stability=stability,
        stability_bound=stability_bound,
        first_round=oldest * first,
        first_round_bound=oldest * first_bound,
        gap=radius * terms.gap,
    )


def game_shape(shape: Shape) -> Shape:
    """`shape` as a tuple if it is (m, n), or (b, m, n) for b games."""
    shape = tuple(shape)
    if len(shape) not in (2, 3):
        raise ValueError(f"shape must be (m, n) or (b, m, n), got {shape}")
    for side in shape:
        _checks.count("every side of shape", side)
    return shape


def of_the_same(state: object, own: Mapping[str, Any]) -> None:
    """Raise unless `state` is a mapping that agrees with all of `own`."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state must be what state_dict() returned, got {type(state).__name__}"
        )
    for name, value in own.items():
        if name not in state or state[name] != value:
            raise ValueError(
                f"the state has {name}={state.get(name)!r}, this object {value!r}; load it into "
                f"one built like the one that saved it"
            )


def saved_count(state: Mapping[str, Any], name: str) -> int:
    """The count `name` ≥ 0 of a saved state."""
    if name not in state:
        raise ValueError(f"the state has no {name}; it is of another game or damaged")
    return _checks.count(f"the state's {name}", state[name], minimum=0)


def saved(state: Mapping[str, Any], name: str, own: Tensor) -> Tensor:
    """A copy of the tensor `name` of a saved state, if it is like `own`, on the device of `own`."""
    tensor = state.get(name)
    if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
        raise ValueError(
            f"the state's {name} must be a tensor {tuple(own.shape)} of {own.dtype}, got "
            f"{getattr(tensor, 'shape', tensor)!r}; it is of another game or damaged"
        )
    _checks.finite(f"the state's {name}", tensor)
    return tensor.to(own.device, copy=True)


_SUMS = ("total", "loss", "length", "outside")


def _promise(action: Tensor) -> float:
    return PROMISE.get(action.dtype, PROMISE[torch.float32])


def _frobenius(x: Tensor) -> Tensor:
    """‖X‖_F of every matrix, of any scale whose entries float64 holds."""
    top = x.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return top[..., 0, 0] * torch.linalg.matrix_norm(x / top)


class _Terms:
    """The terms of one potential with their bounds, undiscounted, for D = 1."""

    def __init__(
        self, potential: Potential, shape: Shape, stream: int, device: torch.device
    ) -> None:
        self.potential, self.stream = potential, stream
        self.constants = potential.admissibility(*shape)
        self.eta = 1.0 if self.constants is None else self.constants.eta
        self.gap = torch.zeros((), dtype=torch.float64, device=device)

    def value(self, s: Tensor, smoothing: Tensor) -> Tensor:
        if isinstance(self.potential, Regularized):
            gap = self.potential.solve(s.detach(), smoothing).frank_wolfe_gap
            self.gap = torch.maximum(self.gap, gap.amax())
        if isinstance(self.potential, Gaussian):
            return self.potential.value(s, smoothing, stream=self.stream)
        return self.potential.value(s, smoothing)

    def bregman(self, s: Tensor, step: Tensor, smoothing: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = s.detach().requires_grad_()
            value = self.value(leaf, smoothing)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        divergence = self.value(s + step, smoothing) - value.detach() - (slope * step).sum((-2, -1))
        if self.constants is None:
            return divergence, torch.full_like(divergence, torch.inf)
        return divergence, theory.bregman_bound(step, smoothing, beta=self.constants.beta)

    def stability_bound(self, before: Tensor, after: Tensor) -> Tensor:
        if self.constants is None:
            return torch.full(after.shape[:-2], torch.inf, dtype=after.dtype, device=after.device)
        return theory.stability_bound(before, after, alpha=self.constants.alpha)
