"""thm-pion: Pion with the theorem's γ, D and T, and what a finite number of draws costs (5.2)."""

from collections.abc import Iterator

from nucleon.claims import optimizers
from nucleon.claims.beside import EXACT
from nucleon.claims.conversions import FEW, SHAPE, Measured
from nucleon.claims.engine import Claim, Item, Run, above
from nucleon.claims.oracle import bounds, conversion
from nucleon.claims.processes import thm_leon
from nucleon.claims.processes.o2nc import MOST_ERRORS
from nucleon.online.learners import FTPL

SAMPLES = ((1, 4, 16), (1, 16))
RHO = (4.0, 12.0)
HEIGHT = (0.09, 0.099)  # ΔL/ρ under resistance


def measure(run: Run) -> Iterator[Item]:
    targets = thm_leon.kinks(run, "pion", RHO), thm_leon.resistance(run, "pion", HEIGHT)
    samples = run.pick(SAMPLES)
    points = [
        {"target": target, "problem": target.name, "k": k, "name": f"Pion, k={k}"}
        for target in targets
        for k in (samples[-1:] if run.quick and target.name == "kinks" else samples)
    ]
    rows = run.each(points, lambda target, k: target.run(FTPL, samples=k), Measured)
    resisted = rows.where(problem="resistance")
    for row in (*rows.where(problem="kinks"), resisted[-1]):
        yield thm_leon.arrival(row)
    single = resisted.one(k=1)
    low = single.mean_gap.low
    yield above("k = 1 under resistance: gap, lower end", low, single.target.epsilon)
    c = conversion.pion_factor(SHAPE[0], bounds.padded(*SHAPE))
    players = {"Pion, k=4": (FTPL, {"samples": 4})}
    yield from thm_leon.verdicts(run, rows, players, factor=c, constant=2 * 2**0.5 * c)
    yield from optimizers.checks(SHAPE, names=("Pion",), seed=run.seed)
    yield from thm_leon.NOTES
    yield (
        "The theorem takes the mean over the noise as exact, and gradients that were fixed before "
        "it was drawn. The gradients of a run answer the action that was drawn: with k = 1 it is "
        "as bold as Muon's, and the mean over more draws is less bold."
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
        f"k = 4 are the reference's to {EXACT:g}; its lengths and τ have their laws."
    ),
    measure=measure,
    seconds=(80, 5),
)
