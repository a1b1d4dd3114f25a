"""Faults of lemmas, noise, certificates and solvers, and the claims that must notice them."""

import dataclasses

import torch
from fault import fault, replace

from nucleon import noise
from nucleon.online import admissibility, potentials, theory
from nucleon.online.learners import adagrad, ftpl, gbpa, projected
from nucleon.online.theory import Sides


def scale_right(name: str, factor: float) -> None:
    """The right side of an inequality times a factor."""

    def scaled(inequality):
        def evaluated(*arguments, **options):
            left, right = inequality(*arguments, **options)
            return Sides(left, factor * right)

        return evaluated

    replace(theory, name, scaled)


# ---- lemmas


@fault("Lemma C.3 without its factor 2", "lemmas-shampoo")
def potential_halved():
    scale_right("matrix_potential", 0.5)


@fault("Lemma C.5 with the radius for the diameter", "lemmas-shampoo")
def distance_of_the_radius():
    scale_right("shampoo_distance_term", 0.25)


@fault("Lemma E.2 with 1/k", "lemmas-wishart")
def inverse_mean():
    def wrong(inverse):
        def evaluated(degrees, noncentrality):
            left, right = inverse(degrees, noncentrality)
            return Sides(left, right * (degrees - 2) / degrees)

        return evaluated

    replace(theory, "inverse_chi_square", wrong)


@fault("Lemma E.3 with 1/(n−m)", "lemmas-wishart")
def width_off_by_one():
    def wrong(inverse):
        def evaluated(shift, draws):
            left, right = inverse(shift, draws)
            m, n = shift.shape[-2:]
            return Sides(left, right * (n - m - 1) / (n - m))

        return evaluated

    replace(theory, "inverse_wishart", wrong)


@fault("Lemma G.2 without its second sum", "lemma-discounting")
def first_sum_alone():
    def wrong(losses, *, discount):
        steps = losses.diff()
        powers = discount ** torch.arange(len(steps) - 1, -1, -1, dtype=losses.dtype)
        return Sides(losses[-1] - losses[0], (powers * steps).sum())

    theory.loss_decomposition = wrong


@fault("the ceiling of αβ ≥ ½ with β, not β/2", "prop-tradeoff")
def ceiling_doubled():
    def wrong(tradeoff):
        return lambda x, root, *, alpha, beta: tradeoff(x, root, alpha=alpha, beta=2 * beta)

    replace(theory, "admissibility_tradeoff", wrong)


@fault("a search that reports the stated constants as found", "prop-admissibility", internal=True)
def nothing_searched():
    def stated(estimate):
        def reported(points, constant, measure):
            return dataclasses.replace(estimate(points, constant, measure), found=constant)

        return reported

    replace(admissibility, "_estimate", stated)


# ---- noise


def without_key(name: str) -> None:
    """Normal noise that does not depend on one of its keys."""

    def constant(draw):
        return lambda shape, **keys: draw(shape, **{**keys, name: 0 * keys.get(name, 0)})

    replace(noise, "normal", constant)


@fault("the noise is the same in every sample", "high-probability")
def one_sample():
    without_key("sample")


@fault("the noise is the same in every round", "high-probability")
def one_round():
    without_key("step")


@fault("the noise is the same in every game", "high-probability")
def one_game():
    without_key("stream")


@fault("signs are + three times in four", "tightness")
def unfair_signs():
    def unfair(draw):
        def drawn(shape, *, step=0, **keys):
            return torch.maximum(draw(shape, step=step, **keys), draw(shape, step=step + 7, **keys))

        return drawn

    replace(noise, "signs", unfair)


# ---- certificates


@fault("a certificate without the deviation", "high-probability", internal=True)
def no_deviation():
    gbpa.GBPA._deviation = ftpl.FTPL._deviation = lambda self, oblivious, delta: 0.0


@fault("pairs Z, −Z count as two samples", "high-probability")
def pairs_count_twice():
    ftpl.FTPL.samples_drawn = property(lambda self: self.potential.samples)


@fault("games of a batch have δ each", "high-probability", internal=True)
def delta_of_each():
    def each(deviation):
        def added(self, oblivious, delta):
            return deviation(self, oblivious, min(delta * self.excess.numel(), 0.999))

        return added

    replace(ftpl.FTPL, "_deviation", each)


# ---- without a bound on the gradients


@fault("AdaGrad clips nothing", "remark-unknown-bound", internal=True)
def unclipped():
    def whole(fed):
        return lambda self, gradient, size: (gradient, fed(self, gradient, size)[1])

    replace(adagrad.AdaGradFTRL, "_fed", whole)


@fault("diagonal AdaGrad without δ: bound × 3", "remark-unknown-bound")
def diagonal_bound():
    def tripled(bound):
        def stated(self):
            other = self.preconditioner == "diagonal" and self.offset != "stated"
            return bound(self) * (3 if other else 1)

        return stated

    replace(adagrad.AdaGradFTRL, "bound", tripled)


@fault("what exceeds the bound costs nothing", "remark-unknown-bound", internal=True)
def excess_forgotten():
    def forgotten(within):
        def fed(self, gradient):
            kept, level, excess = within(self, gradient)
            return kept, level, torch.zeros_like(excess)

        return fed

    replace(gbpa.GBPA, "_within_bound", forgotten)


# ---- plans and solvers


@fault("Pion's plan without the factor of its noise", "thm-pion")
def planned_as_leon():
    replace(theory, "ftpl_factor", lambda factor: lambda rows, width: 1.0)


@fault("what is promised, halved", "thm-leon", "thm-pion")
def promise_halved():
    def halved(bound):
        def stated(**options):
            found = bound(**options)
            return theory.ConversionBound(found.descent / 2, found.regret / 2, found.noise / 2)

        return stated

    replace(theory, "stationarity_bound", halved)


@fault("a projection stops at a gap of 1 %", "projection-cost")
def early_projection():
    def early(solve):
        def solved(*arguments, tolerance=1e-6, **options):
            return solve(*arguments, tolerance=max(tolerance, 1e-2), **options)

        return solved

    for module in (potentials, projected):
        replace(module, "quadratic_projection", early)
