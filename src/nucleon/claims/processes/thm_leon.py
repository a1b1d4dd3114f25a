"""thm-leon: Leon with the theorem's γ, D and T gets there; Muon can be kept from it (Thm 5.3)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nucleon.claims import agreement, optimizers
from nucleon.claims.base import Check, Claim, Progress, Result, Settings
from nucleon.claims.conversions import (
    FEW,
    SHAPE,
    Measured,
    Oracle,
    Process,
    agrees,
    conduct,
    convert,
    identity_start,
    sampling,
)
from nucleon.claims.oracle import conversion
from nucleon.claims.processes.o2nc import ESTIMATE, MOST_ERRORS
from nucleon.claims.shown import Figure, Panel, Table, records
from nucleon.online.learners import FAML, FTL, Learner
from nucleon.online.o2nc.plans import Plan, Planned, plan
from nucleon.online.problems.kinks import random_kinks
from nucleon.online.problems.resistance import Resistance

RUNS, QUICK_RUNS = 16, 8
RELATIVE = 0.6  # ε/‖Q‖_* on the kinks: below the first gradient, above what noise leaves
KINKS_RHO, QUICK_KINKS_RHO = 1.0, 8.0
START = 1.15  # W_1 = START·I, where most residuals are on a steep part of their arcs
RESISTED = 0.9  # ε under resistance, below the slope 1 that a walker who never arrives measures
HEIGHT, QUICK_HEIGHT = 0.25, 0.09  # ΔL/ρ there

NOTES = (
    f"On the kinks: {ESTIMATE}",
    "The resistance is a process that answers the path: there is no loss whose gradient it is, and "
    "no point of which the gap would say that it is stationary. Its gap is the mean answer around "
    "the time τ, which the proof bounds all the same.",
    "The right side has what each run fell by, L(W_1) − L(W_T), in the place of ΔL, which bounds "
    "it. Under the resistance there is no noise, and the two sides are equal in the mean: their "
    "difference is a martingale, whose interval should hold 0.",
)


Answers = tuple[Oracle, Callable[[Tensor], Tensor]]
"""The gradients of a run, and what the loss fell by up to W_T."""


@dataclass(frozen=True)
class Target:
    """A problem with its constants, and the plan for it."""

    name: str
    optimizer: Planned
    start: Tensor
    seed: int
    answers: Callable[[int], Answers]
    """Those of a new run of so many rounds."""
    first_gradient: float
    """‖∇L(W_1)‖_*."""
    rho: float
    epsilon: float
    q_nuclear: float
    """‖Q‖_*."""
    loss_gap: float
    gradient_bound: float

    @cached_property
    def plan(self) -> Plan:
        """γ, D and T of the theorem."""
        return plan(
            self.optimizer,
            rho=self.rho,
            epsilon=self.epsilon,
            q_nuclear=self.q_nuclear,
            loss_gap=self.loss_gap,
            gradient_bound=self.gradient_bound,
            shape=SHAPE,
        )

    def run(
        self, learner: Callable[..., Learner], tick: Callable[[], None], **options: Any
    ) -> Measured:
        """Run the conversion with a learner on the planned γ, D and T."""
        oracle, fall = self.answers(self.plan.rounds)
        return convert(self._process(learner), oracle, tick, fall=fall, **options)

    def agrees(self, name: str, learner: Callable[..., Learner], **options: Any) -> Check:
        """The first rounds of such a run beside the reference's."""
        oracle, fall = self.answers(FEW)
        return agrees(f"{name}, {self.name}", self._process(learner), oracle, fall, **options)

    def _process(self, learner: Callable[..., Learner]) -> Process:
        return Process(
            learner,
            self.start,
            self.rho,
            self.plan.discount,
            self.plan.rounds,
            self.gradient_bound,
            self.seed,
            loss_gap=self.loss_gap,
        )


def kinks(optimizer: Planned, rho: float, runs: int, seed: int) -> Target:
    """The finite sum with kinks, from a multiple of I."""
    problem = random_kinks(seed, shape=SHAPE, dtype=torch.float64)
    start = identity_start(START, runs)
    value = problem.value(start)

    def answers(rounds: int) -> Answers:
        return sampling(problem, rounds, runs, seed), lambda w: value - problem.value(w)

    return Target(
        name="kinks",
        optimizer=optimizer,
        start=start,
        seed=seed,
        answers=answers,
        first_gradient=torch.linalg.matrix_norm(problem.gradient(start[0]), "nuc").item(),
        rho=rho,
        epsilon=RELATIVE * problem.q_nuclear,
        q_nuclear=problem.q_nuclear,
        loss_gap=problem.value(start[0]).item(),
        gradient_bound=problem.gradient_bound,
    )


def resistance(optimizer: Planned, height: float, runs: int, seed: int) -> Target:
    """The oracle that resists a bold second row, ρ = 1."""
    start = identity_start(0.0, runs)
    still = Resistance(start, height=height)
    return Target(
        name="resistance",
        optimizer=optimizer,
        start=start,
        seed=seed,
        answers=lambda rounds: _resisting(Resistance(start, height=height)),
        first_gradient=still.slope,
        rho=1.0,
        epsilon=RESISTED,
        q_nuclear=still.q_nuclear,
        loss_gap=height,
        gradient_bound=still.gradient_bound,
    )


def _resisting(walk: Resistance) -> Answers:
    """The answers of one walk, and what it fell by: after the last answer, the one at W_T."""
    height = walk.height

    def oracle(w: Tensor, t: int) -> tuple[Tensor, Tensor]:
        gradient = walk.gradient(w)
        return gradient, gradient

    return oracle, lambda w: height - walk.height


def run(settings: Settings, progress: Progress) -> Result:
    """Plan, run and measure Leon and Muon on both problems; `quick` takes larger ρ, fewer runs."""
    runs, seed = len(settings.seed_range(RUNS, QUICK_RUNS)), settings.first_seed
    smooth = kinks("leon", QUICK_KINKS_RHO if settings.quick else KINKS_RHO, runs, seed)
    rough = resistance("leon", QUICK_HEIGHT if settings.quick else HEIGHT, runs, seed)
    progress.begin(2 * (smooth.plan.rounds + rough.plan.rounds), "rounds")
    found: dict[tuple[str, str], Measured] = {}
    for target in (smooth, rough):
        for name, learner in (("Leon (FAML)", FAML), ("Muon (FTL)", FTL)):
            found[target.name, name] = target.run(
                learner, lambda stage=f"{name}, {target.name}": progress.advance(1, stage)
            )
    muon = found["resistance", "Muon (FTL)"].gap
    checks = (
        *premises(smooth),
        *premises(rough),
        *(arrival(target, "Leon (FAML)", found) for target in (smooth, rough)),
        *proposition(found),
        Check("Muon under resistance: gap, lower end", muon.low, ">", rough.epsilon),
        *(check for target in (smooth, rough) for check in planned(target, 1.0, 2.0)),
        *conduct(seed),
        *(
            target.agrees(name, learner)
            for target in (smooth, rough)
            for name, learner in (("Leon", FAML), ("Muon", FTL))
        ),
        *optimizers.checks(SHAPE, names=("Muon", "Leon"), seed=seed),
        *optimizers.certified_checks(SHAPE, seed=seed),
    )
    ground = found["kinks", "Muon (FTL)"].gap
    return Result(
        checks=checks,
        tables=(plans(smooth, rough), gaps(found, (smooth, rough))),
        figures=(figure(found, (smooth, rough)),),
        records=traced(found),
        notes=(
            *NOTES,
            "Leon and Muon run as what they are, the conversion of FAML and of FTL; the optimizers "
            'with gradient_bound, step_length="exponential" and no scaling take the same steps. '
            "Leon does so here, and its certificate is the reference's.",
            "The plan's constants are safe, so the measured gap is far below ε.",
            f"Muon gets there on the kinks too ({ground}): it has no theorem, not a failure on "
            f"every problem. What it loses as a learner it must pay by climbing the loss, since "
            f"E[L(W_t) − L(W_t-1)] = E⟨G_t, X_t⟩. The resistance makes it climb; it answers the "
            f"path and is no fixed function of W. We know of no fixed loss in few dimensions that "
            f"does the same to Muon at these γ and D.",
        ),
    )


def premises(target: Target) -> tuple[Check, Check]:
    """That the theorem applies, and that the target is not met at the start."""
    theorem = Check(
        f"{target.name}: what the proof promises",
        target.plan.bound.total
        if target.plan.bound and target.plan.kind == "reachable"
        else math.inf,
        "≤",
        target.epsilon,
    )
    first = Check(f"{target.name}: first gradient", target.first_gradient, ">", target.epsilon)
    return theorem, first


def planned(target: Target, factor: float, constant: float) -> tuple[Check, Check]:
    """γ, D and T, and the terms promised, against the reference's: C = `factor`, c = `constant`."""
    known = {
        "q_nuclear": target.q_nuclear,
        "loss_gap": target.loss_gap,
        "gradient_bound": target.gradient_bound,
    }
    rows, aim = min(SHAPE), {"rho": target.rho, "epsilon": target.epsilon}
    wanted = conversion.plan(**aim, **known, rows=rows, factor=factor)
    errors = (
        (1 - target.plan.discount) / (1 - wanted.discount) - 1,
        target.plan.radius / wanted.radius - 1,
        # Rounding may decide which integer is the next above an integer.
        max(0, abs(target.plan.rounds - wanted.rounds) - 1),
    )
    # At the plan's own T, since the term of the descent falls with it.
    own = replace(wanted, rounds=target.plan.rounds)
    terms = conversion.promised(own, **known, rows=rows, constant=constant)
    bound = target.plan.bound
    mine = [math.nan] if bound is None else [bound.descent, bound.regret, bound.noise]
    name = "against the reference's"
    return (
        agreement.close(f"{target.name}: γ, D and T {name}", *errors),
        agreement.close(f"{target.name}: what is promised, term by term, {name}", mine / terms - 1),
    )


def arrival(target: Target, name: str, found: dict[tuple[str, str], Measured]) -> Check:
    """That the measured gap is within ε."""
    gap = found[target.name, name].gap
    return Check(f"{name}, {target.name}: gap, upper end", gap.high, "≤", target.epsilon)


def proposition(found: dict[tuple[str, str], Measured]) -> tuple[Check, ...]:
    """That left ≤ right is not contradicted, with what each run fell by in the place of ΔL.

    Under resistance the two are equal in the mean, so neither is the other contradicted there. For
    eight runs a difference is above 4.5 standard errors once in 700 times.
    """
    upper = (
        Check(f"{name}, {problem}: left − right, lower end", m.excess(MOST_ERRORS).low, "≤", 0.0)
        for (problem, name), m in found.items()
    )
    lower = (
        Check(f"{name}, {problem}: right − left, lower end", -m.excess(MOST_ERRORS).high, "≤", 0.0)
        for (problem, name), m in found.items()
        if problem == "resistance"
    )
    return *upper, *lower


def plans(*targets: Target) -> Table:
    """The targets and what was planned for them."""
    return Table.listing(
        "What was planned",
        targets,
        {
            "problem": lambda t: t.name,
            "ρ": lambda t: t.rho,
            "ε": lambda t: t.epsilon,
            "ΔL": lambda t: t.loss_gap,
            "G": lambda t: t.gradient_bound,
            "γ": lambda t: t.plan.discount,
            "D": lambda t: t.plan.radius,
            "T": lambda t: float(t.plan.rounds),
            "promised": lambda t: t.plan.bound.total if t.plan.bound else math.nan,
        },
    )


def gaps(found: dict[tuple[str, str], Measured], targets: tuple[Target, ...]) -> Table:
    """What was measured, in means over the runs."""
    epsilon = {target.name: target.epsilon for target in targets}
    return Table.listing(
        "What was measured, ± 3 standard errors over the runs",
        found.items(),
        {
            "optimizer, problem": lambda item: f"{item[0][1]}, {item[0][0]}",
            "gap": lambda item: str(item[1].gap),
            "ε": lambda item: epsilon[item[0][0]],
            "descent term": lambda item: item[1].terms.descent.mean().item(),
            "regret term": lambda item: item[1].terms.regret.mean().item(),
            "noise term": lambda item: item[1].terms.noise.mean().item(),
            "right side": lambda item: item[1].terms.bound.mean().item(),
            "gap − right side": lambda item: str(item[1].excess()),
        },
    )


def figure(found: dict[tuple[str, str], Measured], targets: tuple[Target, ...]) -> Figure:
    """The gap along the way, a panel a problem."""

    def panel(target: Target) -> Panel:
        names = [name for problem, name in found if problem == target.name]
        lines = (found[target.name, n].series(n, style) for style, n in enumerate(names))
        title = f"{target.name}, ε = {target.epsilon:.3g}"
        return Panel(title, "round t", "gap at W̄_t", tuple(lines), y_scale="log")

    caption = "The nuclear norm of the mean gradient around W̄_t: mean over the runs, and its range."
    panels = tuple(panel(target) for target in targets)
    return Figure("gap", "Stationarity along the way", caption, panels)


def traced(found: dict[tuple[str, str], Measured]) -> tuple[dict[str, object], ...]:
    """One record for each problem and optimizer, with a number for every run."""
    return records(
        found.items(),
        {
            "problem": lambda item: item[0][0],
            "optimizer": lambda item: item[0][1],
            "gap": lambda item: item[1].terms.gap.tolist(),
            "gap_at_tau": lambda item: item[1].terms.gap_at_tau.tolist(),
            "regret": lambda item: item[1].terms.regret.tolist(),
            "noise": lambda item: item[1].terms.noise.tolist(),
            "descent": lambda item: item[1].terms.descent.tolist(),
        },
    )


CLAIM = Claim(
    id="thm-leon",
    title="Leon reaches a stationary point in the planned number of steps",
    statement=(
        "With the γ, D and T of the theorem Leon finds a (ρ, ε)-stationary point of a nonsmooth "
        "nonconvex loss, and arrives against a process that answers the path, which is no fixed "
        "loss but has what the proof uses of one; that process keeps Muon from arriving."
    ),
    place="Theorem 5.3, Appendix G",
    tolerance=(
        "On a finite sum with kinks and against the resistance, a process and not a loss, whose "
        "first gradients are above ε, Leon's measured gap is at most ε for the upper end of ± 3 "
        "standard errors; under the resistance Muon's is above ε for the lower end. Left − right "
        "of the proposition, with the actual fall of each run for ΔL, is at most 0 for the lower "
        f"end of ± {MOST_ERRORS:g} standard errors, and under the resistance, where both are "
        f"equal, at least 0 for the upper end. γ, D and T, the terms promised, the process's "
        f"averages, and the first {FEW} rounds of every run are the reference's to "
        f"{agreement.EXACT:g}; its lengths and τ have their laws. So are the regret and the bound "
        f"in the certificate of Leon as an optimizer, and its steps to {optimizers.EXACT:g}."
    ),
    run=run,
    seconds=60,
    quick_seconds=12,
)
