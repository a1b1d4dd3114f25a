"""Proposition G.1 on a run: its left side, and its right side term by term."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.linalg.norms import nuclear_norm
from nucleon.online.o2nc.optimizer import O2NC

_BLOCK_BYTES = 2**24  # of the rounds whose nuclear norms are computed in one call; at least one


@dataclass(frozen=True, eq=False)
class ConversionTerms:
    """The two sides of Proposition G.1 on a run: a number each, or (b,) for independent processes.

    `gap` stands for E_τ‖∇L(W̄_τ)‖^{[ρ]}: the mean over τ is exact, the distribution around W̄_τ is
    that of the iterates. Their distance to W̄_τ is at most ρ in expectation over the lengths, not
    on every path. So it is an estimate, to be averaged over runs.
    """

    gap: Tensor
    """E_τ‖E∇L(Y_τ)‖_*, Pr(Y_t = W_s) ∝ γ^{t-s}: the left side."""
    descent: Tensor
    """ΔL/(DT) = 2γΔL/((1−γ)ρT)."""
    regret: Tensor
    """(Reg_T(1) + (1−γ)Σ_{t<T} Reg_t(1))/T."""
    noise: Tensor
    """Mean with the same weights of ‖Σ_{s≤t} γ^{t-s}(G_s − ∇L(W_s))‖_*."""

    @property
    def bound(self) -> Tensor:
        """The right side, which bounds `gap` in expectation."""
        return self.descent + self.regret + self.noise


class ConversionMeter:
    """Measures Proposition G.1 on a run of `O2NC`, in one pass and constant memory.

    Before each step, with G_t in the `grad` of the parameters, call `record` with ∇L(W_t).

    Args:
        optimizer: whose run is measured, before its first round.
        points: how many points of `curve` to keep, about (default 200).
    """

    def __init__(self, optimizer: O2NC, points: int = 200) -> None:
        self.optimizer = optimizer
        self.every = max(1, optimizer.rounds // _checks.count("points", points))
        self.round = 0
        self.curve: list[tuple[int, Tensor]] = []
        """(t, ‖E∇L(Y_t)‖_*), every few rounds."""
        # Σγ^{t-s} of ∇L(W_s), of the noise G_s − ∇L(W_s), and of G_s
        self._sums = [p.new_zeros(3, *p.shape, dtype=torch.float64) for p in optimizer.params]
        self._loss = torch.zeros_like(optimizer.tau, dtype=torch.float64)
        self._block = max(1, _BLOCK_BYTES // sum(total.nbytes for total in self._sums))
        self._pending: list[tuple[list[Tensor], Tensor]] = []
        self._means = self._loss.new_zeros(3, *self._loss.shape)

    @torch.no_grad()
    def record(self, truths: Sequence[Tensor]) -> None:
        """Enter round t: `truths` holds ∇L(W_t) of each parameter."""
        if self.round != self.optimizer.round:
            raise RuntimeError(
                f"record() comes once before each step; it was called {self.round} times before "
                f"round {self.optimizer.round + 1}"
            )
        discount, losses = self.optimizer.discount, list[Tensor]()
        moves = zip(self.optimizer.params, truths, self.optimizer.actions, strict=True)
        for index, (param, truth, action) in enumerate(moves):
            gradient, truth = cast(Tensor, param.grad).double(), truth.double()
            new = torch.stack((truth, gradient - truth, gradient))
            self._sums[index] = discount * self._sums[index] + new
            losses.append(self._per_run((gradient * action).sum((-2, -1)), param))
        self._loss = discount * self._loss + torch.stack(losses).sum(0)
        self._pending.append((list(self._sums), self._loss))
        self.round += 1
        if len(self._pending) == self._block or self.round == self.optimizer.rounds:
            self._flush()

    def terms(self, loss_gap: float | Tensor) -> ConversionTerms:
        """Return both sides, after the last round.

        Args:
            loss_gap: ΔL = L(W_0) − inf L, or what the loss fell by on each run, which is sharper.
        """
        rounds = self.optimizer.rounds
        if self.round != rounds:
            raise RuntimeError(
                f"the proposition is on all {rounds} rounds; {self.round} are recorded"
            )
        gap, noise, regret = self._means / rounds
        descent = torch.as_tensor(loss_gap).to(gap) / (self.optimizer.radius * rounds)
        return ConversionTerms(gap, descent.expand_as(gap), regret, noise)

    def _flush(self) -> None:
        """Enter the pending rounds into the weighted sums of the three quantities."""
        discount, rounds = self.optimizer.discount, self.optimizer.rounds
        losses = torch.stack([loss for _, loss in self._pending])  # (block,) or (block, b)
        norms = torch.zeros_like(losses).unsqueeze(1).repeat_interleave(3, 1)
        for index, param in enumerate(self.optimizer.params):
            sums = torch.stack([sums[index] for sums, _ in self._pending])  # (block, 3, …, m, n)
            norms += self._per_run(nuclear_norm(sums), param)
        norms[:, 2] += losses / self.optimizer.radius

        times = torch.arange(self.round - len(losses) + 1, self.round + 1, device=losses.device)
        weights = torch.full_like(times, 1 - discount, dtype=torch.float64)
        weights[times == rounds] = 1.0
        self._means += torch.einsum("t,t...->...", weights, norms)
        # E∇L(Y_t) is the first sum over Σγ^{t-s} = (1−γ^t)/(1−γ).
        shares = (1 - discount) / -torch.expm1(times.double() * math.log(discount))
        gaps = torch.einsum("t,t...->t...", shares, norms[:, 0])
        every = zip(times.tolist(), gaps, strict=True)
        self.curve += [(t, gap) for t, gap in every if t % self.every == 0]
        self._pending.clear()

    def _per_run(self, values: Tensor, param: Tensor) -> Tensor:
        """Return one value per process: the sum over the slices of a stack unless independent."""
        stacked = param.ndim == 3 and not self.optimizer.param_groups[0]["independent"]
        return values.sum(-1) if stacked else values
