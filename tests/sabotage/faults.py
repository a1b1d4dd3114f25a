"""Faults of the mathematics, and the claims that must notice them."""

import dataclasses
import math

import torch
from fault import PATCH, fault, plant, times

import nucleon
from nucleon import certificate, moments, noise
from nucleon.online import admissibility, potentials, regret, streams, theory
from nucleon.online.learners import adagrad, base, ftpl, gbpa, scalar_gbpa, shampoo
from nucleon.online.o2nc import meter, plans
from nucleon.online.o2nc import optimizer as o2nc
from nucleon.online.problems import quasi_newton, rotations
from nucleon.online.theory import Sides
from nucleon.optim import average
from nucleon.optim.engines import ledger, reference
from nucleon.optim.watch import certificates

# ---- optimizers


@fault("Pion steps uphill", "fig-ripples", (nucleon.Pion, "step"))
def pion_uphill(step, self, closure=None):
    params = [p for group in self.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    loss = step(self, closure)
    with torch.no_grad():
        for param, old in zip(params, before, strict=True):
            param.copy_(2 * old - param)
    return loss


def with_options(change):
    """Construct an optimizer with change(β₁, options)."""

    def built(init, self, params, lr=0.02, momentum=0.95, **options):
        init(self, params, lr, momentum=momentum, **options | change(momentum, options))

    return built


def averages(momentum, options):
    """Averages of G and GGᵀ scale Ĝ by 1−β₁ and M̂ by 1−β₂; the direction sees the ratio."""
    beta2 = options.get("beta2") or momentum**2
    return {"smoothing_scale": (1 - beta2) / (1 - momentum) ** 2}


without_smoothing = with_options(lambda momentum, options: {"smoothing_scale": 0.0})
fault("Pion is Muon", "fig-ripples", (nucleon.Pion, "__init__"))(without_smoothing)
fault("Leon is Muon", "fig-ripples", (nucleon.Leon, "__init__"))(without_smoothing)
fault("averages in the place of sums", "fig-ripples app-training", (nucleon.Leon, "__init__"))(
    with_options(averages)
)
fault("Leon forgets M̂ with β₁, not β₁²", "thm-leon", (nucleon.Leon, "__init__"))(
    with_options(lambda momentum, options: {"beta2": momentum})
)


@fault("Muon's momentum is 1 − β₁", "fig-ripples", (nucleon.Muon, "__init__"))
def muon_momentum(init, self, params, lr=0.02, momentum=0.95, **options):
    init(self, params, lr, momentum=1 - momentum, **options)


@fault("Leon's floor is G², not G²β₁⁻²", "thm-leon", (reference, "smoothing_of"))
def leon_floor(smoothing, gram, hyper):
    return smoothing(gram, dataclasses.replace(hyper, raised_bound=hyper.gradient_bound))


fault("the optimizer's exponential steps are twice as long", "thm-leon", (reference, "_length"))(
    times(2)
)
fault("a run's certificate: the bound halved", "thm-leon", (certificates, "_bound"))(times(0.5))


def change_excess(change):
    """Put change(before, after, γ) in the place of the excess that a run's ledger enters."""

    def recorded(record, work, settings, *arguments):
        entries = [state["ledger.excess"] for state in work.states]
        before = [entry.clone() for entry in entries]
        record(work, settings, *arguments)
        for entry, old in zip(entries, before, strict=True):
            entry.copy_(change(old, entry, settings.group["momentum"]))

    return recorded


fault("a run's certificate: no excess", "thm-leon", (ledger, "record"))(
    change_excess(lambda old, new, discount: torch.zeros_like(new))
)
fault("a run's certificate: excess discounted by γ²", "thm-leon", (ledger, "record"))(
    change_excess(lambda old, new, discount: new - discount * (1 - discount) * old)
)


# ---- moments, smoothing, η

fault(
    "M̂ discounted by γ, not γ²",
    "thm-gbpa lemma-decomposition o2nc thm-leon",
    (moments, "accumulate_gram"),
)(lambda exact, gram, gradient, discount: exact(gram, gradient, discount**0.5))
fault("Λ × 4", "thm-gbpa thm-ftpl ftl-linear", (gbpa.GBPA, "smoothing"))(times(4))


@fault("Λ from M of the round before", "thm-gbpa thm-ftpl ftl-linear")
def smoothing_late():
    def observed(observe, self, gradient, **options):
        self.older = self.gram
        observe(self, gradient, **options)

    def smoothed(smoothing, self):
        newest, self.gram = self.gram, getattr(self, "older", self.gram)
        try:
            return smoothing(self)
        finally:
            self.gram = newest

    plant(observed, (gbpa.GBPA, "observe"))
    plant(smoothed, (gbpa.GBPA, "smoothing"))


fault("η = 1", "thm-gbpa thm-ftpl ftl-linear", (potentials.Admissibility, "eta"))(
    lambda exact, self: 1.0
)


fault("‖G_1‖ of a gradient that is zero", "thm-gbpa", (gbpa.GBPA, "_begun"))(
    lambda exact, self: torch.full_like(exact(self), self.rounds > 0)
)


@fault("tall matrices are not transposed", "thm-gbpa", (gbpa.GBPA, "__init__"))
def as_they_are(init, self, shape, *arguments, **options):
    init(self, shape, *arguments, **options)
    self.tall = False
    self.total = torch.zeros(self.shape, dtype=torch.float64)
    self.gram = self.total @ self.total.mT


fault("the discounted floor is G², not G²γ⁻²", "thm-gbpa", (gbpa.GBPA, "_least"))(
    lambda exact, self, level: (level / self.eta) ** 2
)


# ---- potentials and their constants


def gaussian_constants(alpha, beta):
    """State other constants of the Gaussian potential."""

    def stated(exact, self, m, n):
        width = self.padded_width(m, n)
        if width < m + 2:
            return None
        return potentials.Admissibility(alpha(m, width), beta(m, width))

    return stated


GAUSSIAN = "prop-admissibility thm-ftpl lemma-decomposition", (potentials.Gaussian, "admissibility")
fault("Gaussian α = √n", *GAUSSIAN)(
    gaussian_constants(lambda m, n: math.sqrt(n), lambda m, n: 1 / math.sqrt(n - m - 1))
)
fault("Gaussian β off by one column", *GAUSSIAN)(
    gaussian_constants(lambda m, n: math.sqrt(m) + math.sqrt(n), lambda m, n: 1 / math.sqrt(n - m))
)
fault(
    "Hyperbolic α = β = 0.8",
    "prop-admissibility lemma-decomposition",
    (potentials.Hyperbolic, "admissibility"),
)(lambda exact, self, m, n: potentials.Admissibility(0.8, 0.8))


@fault("FTL plays S/‖S‖_F", "ftl-linear", (potentials.Nuclear, "gradient"))
def leader_by_frobenius(exact, self, s, smoothing):
    return s / torch.linalg.matrix_norm(s, keepdim=True).clamp_min(1e-300)


fault("FAML follows the leader", "ftl-linear thm-gbpa thm-faml", (gbpa.FAML, "_direction"))(
    lambda exact, self, total, smoothing: potentials.Nuclear().gradient(total, smoothing)
)
fault("FTRL's L is Λ, not its root", "prop-admissibility", (potentials, "_symmetric_root"))(
    lambda exact, smoothing: smoothing.double()
)
fault("normal noise of deviation 2", "prop-admissibility", (noise, "normal"))(times(2))


# ---- bounds and regret

GBPA_BOUND = (certificate, "gbpa_bound"), (theory, "gbpa_bound")
for factor in (0.8, 4):
    fault(
        f"the GBPA bound × {factor}",
        "thm-gbpa thm-faml thm-ftpl lemma-decomposition tightness",
        *GBPA_BOUND,
    )(times(factor))
fault("Shampoo's bound × 2", "tab-shampoo", (theory, "shampoo_bound"))(times(2))
fault(
    "one-sided Shampoo's bound with the diameter D",
    "tab-shampoo",
    (theory, "one_sided_shampoo_bound"),
)(times(0.5))
fault("AdaGrad's bounds halved", "tab-adagrad remark-unknown-bound", (theory, "adagrad_bound"))(
    times(0.5)
)


@fault("regret against half of the ball", "thm-faml", (regret.Ledger, "regret"))
def half_comparator(exact, self):
    return exact(self) - self.radius * torch.linalg.svdvals(self.total).sum(-1) / 2


fault("what signs could force × 2√2", "tightness", (base, "forced_regret"))(times(2 * 2**0.5))


# ---- the conversion

fault(
    "O2NC: radius doubled",
    "o2nc thm-leon",
    *((module, "o2nc_radius") for module in (theory, theory.nonconvex, o2nc)),
)(times(2))
fault("steps of constant length", "o2nc thm-leon thm-average", (noise, "exponential"))(
    lambda draw, *arguments, **options: torch.ones_like(draw(*arguments, **options))
)


@fault("O2NC: W̄ without bias correction", "o2nc thm-leon", (o2nc.O2NC, "_average"))
def average_biased(exact, self):
    share = 1 - self.discount
    chosen = (self.tau == self.round).reshape(self._streams.shape)
    for i, param in enumerate(self.params):
        self.average[i] = self.average[i] + share * (param - self.average[i])
        self.output[i] = torch.where(chosen, self.average[i], self.output[i])


@fault("O2NC: τ uniform", "o2nc thm-leon", (o2nc.O2NC, "_draw_tau"))
def tau_uniform(exact, self):
    seed, shape = self.param_groups[0]["seed"], tuple(self._streams.shape)
    u = noise.uniform(shape, seed=seed, stream=self._streams, dtype=torch.float64)
    return (u * self.rounds).ceil().long()


@fault("O2NC: τ of γ^(t+1)", "o2nc thm-leon", (o2nc.O2NC, "_draw_tau"))
def tau_late(exact, self):
    seed, shape = self.param_groups[0]["seed"], (*self._streams.shape, 2)
    u = noise.uniform(shape, seed=seed, stream=self._streams, dtype=torch.float64)
    t = (u[..., 0] * self.rounds).ceil()
    last = u[..., 1] <= self.discount ** (t + 1)
    return torch.where(last, self.rounds, t.long())


@fault("a plan takes the rows of a tall shape", "thm-pion")
def unsorted_shape():
    PATCH.setattr(plans, "sorted", list, raising=False)


@fault("the proposition's descent term as printed", "o2nc", (meter.ConversionMeter, "terms"))
def descent_as_printed(exact, self, loss_gap):
    terms = exact(self, loss_gap)
    return dataclasses.replace(terms, descent=terms.descent / (2 * self.optimizer.discount))


@fault("half of the planned rounds", "thm-leon", (theory, "leon_complexity"))
def few_rounds(exact, **options):
    complexity = exact(**options)
    return dataclasses.replace(complexity, rounds=complexity.rounds // 2)


fault("Pion's plan without the factor of its noise", "thm-pion", (theory, "ftpl_factor"))(
    lambda exact, rows, width: 1.0
)


@fault("what is promised, halved", "thm-leon thm-pion", (theory, "stationarity_bound"))
def promise_halved(exact, **options):
    bound = exact(**options)
    return theory.ConversionBound(bound.descent / 2, bound.regret / 2, bound.noise / 2)


# ---- the classical learners


@fault("Shampoo's left root is M^½", "tab-shampoo")
def left_root():
    PATCH.setattr(shampoo.Shampoo, "powers", (0.5, 0.25))


@fault("tall matrices: Shampoo's left root is M^½", "tab-shampoo")
def left_root_of_tall():
    powers = property(lambda self: (0.5 if self.tall else 0.25, 0.25))
    PATCH.setattr(shampoo.Shampoo, "powers", powers)


@fault(
    "the gaps of projections are reported as 0",
    "tab-shampoo",
    (shampoo.ProjectedLearner, "_minimize"),
)
def no_gaps(minimize, self, *arguments):
    center, gap = minimize(self, *arguments)
    return center, 0 * gap


@fault("learners with a projection ignore η", "tab-shampoo", (shampoo.ProjectedLearner, "__init__"))
def eta_ignored(init, self, shape, *, eta=None, **options):
    init(self, shape, **options)


@fault(
    "one-sided Shampoo projects in the Euclidean norm",
    "tab-shampoo",
    (shampoo.OneSidedShampoo, "_minimize"),
)
def euclidean_projection(minimize, self, linear, left, right):
    largest = torch.linalg.eigvalsh(left)[..., -1:, None]
    return minimize(self, linear, largest * torch.eye(left.shape[-1], dtype=left.dtype), right)


@fault("AdaGrad's diagonal root is ¼", "tab-adagrad", (adagrad._AdaGrad, "_metric"))
def quarter_root(exact, self, moment, delta):
    metric = exact(self, moment, delta)
    if self.preconditioner != "diagonal":
        return metric
    return metric._replace(weight=delta.unsqueeze(-1) + moment**0.25)


fault("OGD's η × 3", "tab-adagrad", (adagrad.AdaGradOGD, "_default_eta"))(times(3))
fault("AdaGrad-FTRL without δ", "tab-adagrad", (adagrad.AdaGradFTRL, "_delta"))(
    lambda exact, self: torch.zeros_like(self.gaps)
)
fault("scalar GBPA with η = 1", "tab-shampoo", (scalar_gbpa.ScalarGBPA, "__init__"))(
    lambda init, self, shape, **options: init(self, shape, **{"eta": 1.0, **options})
)


fault("the adversary is a Gaussian stream", "thm-ftpl", (streams, "adversary"))(
    lambda exact, shape, **options: streams.gaussian(shape, **options)
)


# ---- without a bound on the gradients

fault("the scale-free bound × 0.9", "remark-unknown-bound", (theory, "scale_free_adagrad_bound"))(
    times(0.9)
)
fault("AdaGrad clips nothing", "remark-unknown-bound", (adagrad.AdaGradFTRL, "_fed"))(
    lambda fed, self, gradient, size: (gradient, fed(self, gradient, size)[1])
)


@fault(
    "diagonal AdaGrad without δ: bound × 3", "remark-unknown-bound", (adagrad.AdaGradFTRL, "bound")
)
def diagonal_bound(bound, self):
    other = self.preconditioner == "diagonal" and self.offset != "stated"
    return bound(self) * (3 if other else 1)


@fault("what exceeds the bound costs nothing", "remark-unknown-bound", (gbpa.GBPA, "_within_bound"))
def excess_forgotten(within, self, gradient):
    kept, level, excess = within(self, gradient)
    return kept, level, torch.zeros_like(excess)


# ---- applications and costs


@fault(
    "the quasi-Newton gradient is not symmetrized",
    "app-quasi-newton",
    (quasi_newton.CurvatureLearner, "_enter"),
)
def unsymmetrized(exact, self, direction, slope):
    x = self._action()
    residual = slope - self.half * (x @ direction)
    gradient = -torch.outer(residual, direction) / (2 * self.half)
    self.learner.observe(gradient)
    loss = residual.double().square().sum() / 2
    u, target = direction.double(), (self.center * direction + slope).double()
    self.loss = self.loss + loss
    self._outer = self._outer + torch.outer(u, u)
    self._cross = self._cross + torch.outer(target, u)
    self._square = self._square + target.square().sum()
    return loss


fault(
    "quasi-Newton regret and bound: half of the unit",
    "app-quasi-newton",
    (quasi_newton.CurvatureLearner, "_unit"),
)(lambda exact, self: self.half**2)
fault(
    "the quasi-Newton loss of a matrix in hindsight × 2",
    "app-quasi-newton",
    (quasi_newton.CurvatureLearner, "loss_of"),
)(times(2))
fault("rotations learn the inverse", "app-rotations", (rotations.OnlineRotations, "observe"))(
    lambda observe, self, u, v: observe(self, v, u)
)
fault("the coupled root's flops without its last product", "cost-model", (theory, "coupled_flops"))(
    lambda flops, m, n, *, steps: flops(m, n, steps=steps) - 2.0 * m**2 * n
)


@fault(
    "a projection stops at a gap of 1 %",
    "projection-cost",
    *((module, "quadratic_projection") for module in (potentials, shampoo)),
)
def early_projection(solve, *arguments, tolerance=1e-6, **options):
    return solve(*arguments, tolerance=max(tolerance, 1e-2), **options)


# ---- the average of the iterates

fault("the average is a fifth older", "thm-average", (average, "share"))(
    lambda share, f, t: share(1.2 * f, t)
)
fault(
    "the average's weights are those of half its age",
    "thm-average average-schedule",
    (theory, "average_weights"),
)(lambda weights, f, rounds: weights(f / 2, rounds))
fault("the lengths of the steps are half as long", "thm-average", (noise, "exponential"))(
    times(0.5)
)
fault("the average's distance bound halved", "thm-average", (theory, "average_distance_bound"))(
    times(0.5)
)
fault(
    "the average's convex bound halved",
    "average-schedule",
    (theory, "average_constant_rate_bound"),
)(times(0.5))
fault(
    "the falling rate's bound falls like 1/T",
    "average-schedule",
    (theory, "average_falling_rate_bound"),
)(lambda bound, power, rounds, **options: bound(power, rounds, **options) / rounds**0.5)
fault("the average of the optimizers enters weights twice", "thm-average", (average, "share"))(
    lambda share, f, t: (2 * share(f, t)).clamp_max(1.0)
)


# ---- lemmas


def right(factor):
    """Multiply the right side of an inequality by a factor, or by a function of its arguments."""

    def evaluated(inequality, *arguments, **options):
        sides = inequality(*arguments, **options)
        scale = factor(*arguments) if callable(factor) else factor
        return Sides(sides.left, scale * sides.right)

    return evaluated


def one_more_column(shift, draws):
    """1/(n−m) over 1/(n−m−1)."""
    m, n = shift.shape[-2:]
    return (n - m - 1) / (n - m)


for name, claim, function, factor in (
    ("Lemma C.3 without its factor 2", "lemmas-shampoo", "matrix_potential", 0.5),
    ("Lemma C.4 × 0.9", "lemmas-shampoo", "shampoo_gradient_term", 0.9),
    ("Lemma C.5 with the radius for the diameter", "lemmas-shampoo", "shampoo_distance_term", 0.25),
    ("Proposition C.2 × 1.1", "lemmas-shampoo", "mirror_descent_regret", 1.1),
    ("Lemma E.1 × 0.9", "lemmas-wishart", "nuclear_hessian", 0.9),
    ("Lemma E.2 with 1/k", "lemmas-wishart", "inverse_chi_square", lambda k, _: (k - 2) / k),
    ("Lemma E.3 with 1/(n−m)", "lemmas-wishart", "inverse_wishart", one_more_column),
):
    fault(name, claim, (theory, function))(right(factor))


@fault("Lemma G.2 without its second sum", "lemma-discounting", (theory, "loss_decomposition"))
def first_sum_alone(exact, losses, *, discount):
    steps = losses.diff()
    powers = discount ** torch.arange(len(steps) - 1, -1, -1, dtype=losses.dtype)
    return Sides(losses[-1] - losses[0], (powers * steps).sum())


fault("the ceiling of αβ ≥ ½ with β, not β/2", "prop-tradeoff", (theory, "admissibility_tradeoff"))(
    lambda exact, x, root, *, alpha, beta: exact(x, root, alpha=alpha, beta=2 * beta)
)


@fault(
    "a search that reports the stated constants as found",
    "prop-admissibility",
    (admissibility, "_estimate"),
)
def nothing_searched(estimate, points, constant, measure):
    return dataclasses.replace(estimate(points, constant, measure), found=constant)


# ---- noise and certificates


def without_key(name):
    """Draw noise that does not depend on one of its keys."""
    return lambda draw, shape, **keys: draw(shape, **{**keys, name: 0 * keys.get(name, 0)})


for key, word in (("sample", "sample"), ("step", "round"), ("stream", "game")):
    title = f"the noise is the same in every {word}"
    fault(title, "high-probability", (noise, "normal"))(without_key(key))


@fault("signs are + three times in four", "tightness", (noise, "signs"))
def unfair_signs(draw, shape, *, step=0, **keys):
    return torch.maximum(draw(shape, step=step, **keys), draw(shape, step=step + 7, **keys))


fault(
    "a certificate without the deviation",
    "high-probability",
    *((learner, "_deviation") for learner in (gbpa.GBPA, ftpl.FTPL)),
)(lambda exact, self, oblivious, delta: 0.0)
for kind in ("oblivious", "adaptive"):
    name = f"ftpl_{kind}_deviation"
    fault(f"the {kind} deviation halved", "high-probability", (theory, name))(times(0.5))
fault("pairs Z, −Z count as two samples", "high-probability", (ftpl.FTPL, "samples_drawn"))(
    lambda exact, self: self.potential.samples
)


@fault("games of a batch have δ each", "high-probability", (ftpl.FTPL, "_deviation"))
def delta_of_each(deviation, self, oblivious, delta):
    return deviation(self, oblivious, min(delta * self.excess.numel(), 0.999))
