"""thm-pion: Pion with the theorem's γ, D and T, and what a finite number of draws costs (5.2)."""

from nucleon.claims import agreement, optimizers
from nucleon.claims.base import Check, Claim, Progress, Result, Settings
from nucleon.claims.conversions import FEW, SHAPE, Measured, conduct
from nucleon.claims.oracle import bounds, conversion
from nucleon.claims.processes import thm_leon
from nucleon.claims.processes.o2nc import MOST_ERRORS
from nucleon.online.learners import FTPL

RUNS, QUICK_RUNS = 16, 8
SAMPLES, QUICK_SAMPLES = (1, 4, 16), (1, 16)
RHO, QUICK_RHO = 4.0, 12.0
HEIGHT = 0.09  # ΔL/ρ under resistance


def run(settings: Settings, progress: Progress) -> Result:
    """Plan, run and measure Pion with several k; `quick` takes a larger ρ, fewer k and runs."""
    runs, seed = len(settings.seed_range(RUNS, QUICK_RUNS)), settings.first_seed
    samples = QUICK_SAMPLES if settings.quick else SAMPLES
    ground = thm_leon.kinks("pion", QUICK_RHO if settings.quick else RHO, runs, seed)
    rough = thm_leon.resistance("pion", HEIGHT, runs, seed)
    used = {ground.name: samples[-1:] if settings.quick else samples, rough.name: samples}
    rounds = (len(used[target.name]) * target.plan.rounds for target in (ground, rough))
    progress.begin(sum(rounds), "rounds")
    found: dict[tuple[str, str], Measured] = {}
    for target in (ground, rough):
        for k in used[target.name]:
            found[target.name, _name(k)] = target.run(
                FTPL,
                lambda stage=f"k={k}, {target.name}": progress.advance(1, stage),
                samples=k,
            )
    single = found["resistance", _name(1)].gap
    c = conversion.pion_factor(SHAPE[0], bounds.padded(*SHAPE))
    return Result(
        checks=(
            *thm_leon.premises(ground),
            *thm_leon.premises(rough),
            *(thm_leon.arrival(ground, _name(k), found) for k in used[ground.name]),
            thm_leon.arrival(rough, _name(samples[-1]), found),
            Check("k = 1 under resistance: gap, lower end", single.low, ">", rough.epsilon),
            *thm_leon.proposition(found),
            *(
                check
                for target in (ground, rough)
                for check in thm_leon.planned(target, c, 2 * 2**0.5 * c)
            ),
            *conduct(seed),
            *(target.agrees(_name(4), FTPL, samples=4) for target in (ground, rough)),
            *optimizers.checks(SHAPE, names=("Pion",), seed=seed),
        ),
        tables=(thm_leon.plans(ground, rough), thm_leon.gaps(found, (ground, rough))),
        figures=(thm_leon.figure(found, (ground, rough)),),
        records=thm_leon.traced(found),
        notes=(*thm_leon.NOTES, _finite(rough, found, samples)),
    )


def _name(samples: int) -> str:
    return f"Pion, k={samples}"


def _finite(
    target: thm_leon.Target, found: dict[tuple[str, str], Measured], samples: tuple[int, ...]
) -> str:
    figures = ", ".join(f"k={k}: {found[target.name, _name(k)].gap}" for k in samples)
    return (
        f"The theorem takes the mean over the noise as exact, and gradients that were fixed before "
        f"it was drawn. The gradients of a run answer the action that was drawn: with k = 1 that "
        f"action is as bold as Muon's, and an oracle that resists the drawn action keeps it from "
        f"arriving. The mean over more draws is less bold. Gap under resistance, ε = "
        f"{target.epsilon:g}: {figures}."
    )


CLAIM = Claim(
    id="thm-pion",
    title="Pion reaches a stationary point in the planned number of steps",
    statement=(
        "With the γ, D and T of the theorem Pion finds a (ρ, ε)-stationary point of a nonsmooth "
        "nonconvex loss, the expectation over its noise taken as exact; against a process that "
        "answers the drawn action, which is no fixed loss, one draw does not do."
    ),
    place="Theorem 5.2, Appendix G",
    tolerance=(
        "On a finite sum with kinks the measured gap is at most ε, for the upper end of ± 3 "
        "standard errors, with k = 1, 4 and 16, in quick mode with 16; against the resistance, a "
        "process that answers the drawn action and not a loss, it is so for k = 16 and is above ε, "
        "for the lower end, for k = 1. Left − right of the proposition, with the actual fall of "
        f"each run for ΔL, is at most 0 for the lower end of ± {MOST_ERRORS:g} standard errors, "
        f"and under the resistance, where both are equal, at least 0 for the upper end. γ, D and "
        f"T, the terms promised, the process's averages and the first {FEW} rounds of runs with "
        f"k = 4 are the reference's to {agreement.EXACT:g}; its lengths and τ have their laws."
    ),
    run=run,
    seconds=80,
    quick_seconds=15,
)
