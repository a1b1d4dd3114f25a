"""Faults of optimizers, learners, bounds and applications, and the claims that must notice them."""

import dataclasses
import math

import torch
from fault import fault, replace

import nucleon
from nucleon import certificate, moments, noise
from nucleon.online import potentials, theory
from nucleon.online.learners import adagrad, gbpa, projected, scalar_gbpa, shampoo
from nucleon.online.o2nc import meter as conversion
from nucleon.online.o2nc import optimizer as o2nc
from nucleon.online.o2nc import plans
from nucleon.online.problems import quasi_newton, rotations
from nucleon.online.theory import gbpa as gbpa_theory
from nucleon.optim import average
from nucleon.optim.engines import ledger, reference
from nucleon.optim.watch import certificates

# ---- optimizers


@fault("Pion steps uphill", "fig-ripples", issue=True)
def pion_uphill():
    def uphill(step):
        def stepped(self, closure=None):
            params = [p for group in self.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in params]
            loss = step(self, closure)
            with torch.no_grad():
                for param, old in zip(params, before, strict=True):
                    param.copy_(2 * old - param)
            return loss

        return stepped

    replace(nucleon.Pion, "step", uphill)


def with_options(optimizer, change) -> None:
    def built(init):
        def constructed(self, params, lr=0.02, momentum=0.95, **options):
            init(self, params, lr, momentum, **change(momentum, options))

        return constructed

    replace(optimizer, "__init__", built)


@fault("Pion is Muon", "fig-ripples", issue=True)
def pion_is_muon():
    with_options(nucleon.Pion, lambda momentum, o: {**o, "smoothing_scale": 0.0})


@fault("averages in the place of sums", "fig-ripples", "app-training", issue=True)
def averages():
    # Averages of G and GGᵀ scale Ĝ by 1−β₁ and M̂ by 1−β₂; the direction sees the ratio.
    def averaged(momentum, options):
        beta2 = options.get("beta2") or momentum**2
        return {**options, "smoothing_scale": (1 - beta2) / (1 - momentum) ** 2}

    with_options(nucleon.Leon, averaged)


@fault("Leon is Muon", "fig-ripples")
def leon_is_muon():
    with_options(nucleon.Leon, lambda momentum, o: {**o, "smoothing_scale": 0.0})


@fault("Leon forgets M̂ with β₁, not β₁²", "thm-leon")
def leon_forgets_slowly():
    with_options(nucleon.Leon, lambda momentum, o: {**o, "beta2": momentum})


@fault("Muon's momentum is 1 − β₁", "fig-ripples")
def muon_momentum():
    def built(init):
        def constructed(self, params, lr=0.02, momentum=0.95, **options):
            init(self, params, lr, 1 - momentum, **options)

        return constructed

    replace(nucleon.Muon, "__init__", built)


@fault("Leon's floor is G², not G²β₁⁻²", "thm-leon", internal=True)
def leon_floor():
    def undiscounted(smoothing):
        def made(gram, hyper):
            bound = hyper.gradient_bound * hyper.momentum
            return smoothing(gram, dataclasses.replace(hyper, gradient_bound=bound))

        return made

    replace(reference, "smoothing_of", undiscounted)


@fault("the optimizer's exponential steps are twice as long", "thm-leon", internal=True)
def long_steps():
    replace(reference, "_length", lambda length: lambda *given: 2 * length(*given))


@fault("a run's certificate: the bound halved", "thm-leon", internal=True)
def certified_too_little():
    replace(certificates, "_bound", lambda bound: lambda *arguments: bound(*arguments) / 2)


def change_excess(change) -> None:
    """Put change(before, after, γ) in the place of the excess that a run's ledger enters."""

    def entered(record):
        def recorded(work, settings, *arguments):
            entries = [state["ledger.excess"] for state in work.states]
            before = [entry.clone() for entry in entries]
            record(work, settings, *arguments)
            for entry, old in zip(entries, before, strict=True):
                entry.copy_(change(old, entry, settings.group["momentum"]))

        return recorded

    replace(ledger, "record", entered)


@fault("a run's certificate: no excess", "thm-leon", internal=True)
def no_excess():
    change_excess(lambda old, new, discount: torch.zeros_like(new))


@fault("a run's certificate: excess discounted by γ²", "thm-leon", internal=True)
def excess_forgets_fast():
    change_excess(lambda old, new, discount: new - discount * (1 - discount) * old)


# ---- moments, smoothing, η


@fault(
    "M̂ discounted by γ, not γ²",
    "thm-gbpa",
    "lemma-decomposition",
    "o2nc",
    "thm-leon",
    issue=True,
)
def gram_forgets_slowly():
    def slowly(accumulate):
        return lambda gram, gradient, discount: accumulate(gram, gradient, discount**0.5)

    replace(moments, "accumulate_gram", slowly)


@fault("Λ × 4", "thm-gbpa", "thm-ftpl", "ftl-linear", issue=True)
def smoothing_four():
    replace(gbpa.GBPA, "smoothing", lambda smoothing: lambda self: 4 * smoothing(self))


@fault("Λ from M of the round before", "thm-gbpa", "thm-ftpl", "ftl-linear", issue=True)
def smoothing_late():
    def late(observe):
        def observed(self, gradient, **options):
            self.older = self.gram
            observe(self, gradient, **options)

        return observed

    def from_older(smoothing):
        def smoothed(self):
            newest, self.gram = self.gram, getattr(self, "older", self.gram)
            try:
                return smoothing(self)
            finally:
                self.gram = newest

        return smoothed

    replace(gbpa.GBPA, "observe", late)
    replace(gbpa.GBPA, "smoothing", from_older)


@fault("η = 1", "thm-gbpa", "thm-ftpl", "ftl-linear", issue=True)
def eta_one():
    potentials.Admissibility.eta = property(lambda self: 1.0)


@fault("‖G_1‖ of a gradient that is zero", "thm-gbpa", internal=True)
def first_of_zero():
    def taken(absorb):
        def absorbed(self, gradient):
            absorb(self, gradient)
            if self.rounds == 0:
                self.first_round = torch.ones_like(self.first_round)

        return absorbed

    replace(gbpa.GBPA, "_absorb", taken)


@fault("tall matrices are not transposed", "thm-gbpa", internal=True)
def as_they_are():
    def built(init):
        def constructed(self, shape, *arguments, **options):
            init(self, shape, *arguments, **options)
            self.tall = False
            self.total = torch.zeros(self.shape, dtype=torch.float64)
            self.gram = self.total @ self.total.mT

        return constructed

    replace(gbpa.GBPA, "__init__", built)


@fault("the discounted floor is G², not G²γ⁻²", "thm-gbpa", internal=True)
def floor_undiscounted():
    gbpa.GBPA._least = lambda self, level: (level / self.eta) ** 2


# ---- potentials and their constants


def gaussian_constants(alpha, beta) -> None:
    def stated(self, m, n):
        width = self.padded_width(m, n)
        if width < m + 2:
            return None
        return potentials.Admissibility(alpha(m, width), beta(m, width))

    potentials.Gaussian.admissibility = stated


@fault("Gaussian α = √n", "prop-admissibility", "thm-ftpl", "lemma-decomposition", issue=True)
def alpha_small():
    gaussian_constants(lambda m, n: math.sqrt(n), lambda m, n: 1 / math.sqrt(n - m - 1))


@fault(
    "Gaussian β off by one column",
    "prop-admissibility",
    "thm-ftpl",
    "lemma-decomposition",
    issue=True,
)
def beta_small():
    gaussian_constants(lambda m, n: math.sqrt(m) + math.sqrt(n), lambda m, n: 1 / math.sqrt(n - m))


@fault("FTL plays S/‖S‖_F", "ftl-linear")
def leader_by_frobenius():
    def normalized(self, s, smoothing):
        return s / torch.linalg.matrix_norm(s, keepdim=True).clamp_min(1e-300)

    potentials.Nuclear.gradient = normalized


@fault("FTRL's L is Λ, not its root", "prop-admissibility", internal=True)
def regularizer_squared():
    potentials._symmetric_root = lambda smoothing: smoothing.double()


@fault("normal noise of deviation 2", "prop-admissibility")
def loud_noise():
    replace(noise, "normal", lambda normal: lambda *a, **k: 2 * normal(*a, **k))


# ---- bounds and regret


def scale_gbpa_bound(factor: float) -> None:
    changed = gbpa_theory.gbpa_bound

    def scaled(*arguments, **options):
        return factor * changed(*arguments, **options)

    certificate.gbpa_bound = gbpa_theory.gbpa_bound = theory.gbpa_bound = scaled


@fault(
    "the GBPA bound × 0.8",
    "thm-gbpa",
    "thm-faml",
    "thm-ftpl",
    "lemma-decomposition",
    issue=True,
)
def bound_small():
    scale_gbpa_bound(0.8)


@fault("the GBPA bound × 4", "thm-gbpa", "thm-faml", "thm-ftpl", "lemma-decomposition", issue=True)
def bound_large():
    scale_gbpa_bound(4.0)


@fault("Shampoo's bound × 2", "tab-shampoo")
def shampoo_bound_large():
    replace(theory, "shampoo_bound", lambda bound: lambda *a, **k: 2 * bound(*a, **k))


@fault("one-sided Shampoo's bound with the diameter D", "tab-shampoo")
def one_sided_bound_small():
    replace(theory, "one_sided_shampoo_bound", lambda bound: lambda *a, **k: bound(*a, **k) / 2)


@fault("regret against half of the ball", "thm-faml")
def half_comparator():
    def halved(regret):
        def counted(self):
            nuclear = torch.linalg.svdvals(self.total).sum(-1)
            return regret(self) - self.radius * nuclear / 2

        return counted

    replace(nucleon.online.regret.Ledger, "regret", halved)


@fault("what signs could force × 2√2", "tightness")
def forced_too_much():
    replace(
        nucleon.online.regret.Ledger,
        "lower",
        lambda lower: lambda self: 2 * math.sqrt(2) * lower(self),
    )


# ---- the conversion


@fault("O2NC: steps of constant length", "o2nc", "thm-leon", issue=True)
def constant_lengths():
    replace(noise, "exponential", lambda draw: lambda *a, **k: torch.ones_like(draw(*a, **k)))


@fault("O2NC: radius doubled", "o2nc", "thm-leon", issue=True)
def radius_doubled():
    doubled = theory.o2nc_radius

    def wide(**options):
        return 2 * doubled(**options)

    theory.o2nc_radius = theory.nonconvex.o2nc_radius = o2nc.o2nc_radius = wide


@fault("O2NC: W̄ without bias correction", "o2nc", "thm-leon", issue=True, internal=True)
def average_biased():
    def biased(self):
        share = 1 - self.discount
        chosen = self.tau == self.round
        chosen = chosen[:, None, None] if chosen.ndim else chosen
        for param in self.params:
            state = self.state[param]
            state["average"] = state["average"] + share * (param - state["average"])
            state["output"] = torch.where(chosen, state["average"], state["output"])

    o2nc.O2NC._average = biased


@fault("O2NC: τ uniform", "o2nc", "thm-leon", issue=True, internal=True)
def tau_uniform():
    def uniform(self):
        seed = self.param_groups[0]["seed"]
        u = noise.uniform(
            tuple(self._streams.shape), seed=seed, stream=self._streams, dtype=torch.float64
        )
        return (u * self.rounds).ceil().long()

    o2nc.O2NC._draw_tau = uniform


@fault("O2NC: τ of γ^(t+1)", "o2nc", "thm-leon", internal=True)
def tau_late():
    def late(self):
        seed, shape = self.param_groups[0]["seed"], (*self._streams.shape, 2)
        u = noise.uniform(shape, seed=seed, stream=self._streams, dtype=torch.float64)
        t = (u[..., 0] * self.rounds).ceil()
        last = u[..., 1] <= self.discount ** (t + 1)
        return torch.where(last, self.rounds, t.long())

    o2nc.O2NC._draw_tau = late


@fault("a plan takes the rows of a tall shape", "thm-pion", internal=True)
def unsorted_shape():
    plans.sorted = list


@fault("the proposition's descent term as printed", "o2nc")
def descent_as_printed():
    def printed(terms):
        def told(self, loss_gap):
            found = terms(self, loss_gap)
            return dataclasses.replace(found, descent=found.descent / (2 * self.optimizer.discount))

        return told

    replace(conversion.ConversionMeter, "terms", printed)


@fault("half of the planned rounds", "thm-leon")
def few_rounds():
    def halved(complexity):
        def planned(**options):
            found = complexity(**options)
            return dataclasses.replace(found, rounds=found.rounds // 2)

        return planned

    replace(theory, "leon_complexity", halved)


# ---- the classical learners


@fault("Shampoo's left root is M^½", "tab-shampoo", issue=True, internal=True)
def left_root():
    def roots(self, grams):
        left, right = grams["gram"], grams["column_gram"]
        return (
            projected.Root(left, epsilon=self.epsilon, power=0.5),
            projected.Root(right, epsilon=self.epsilon, power=0.25),
        )

    shampoo.Shampoo._roots = roots


@fault("tall matrices: Shampoo's left root is M^½", "tab-shampoo", internal=True)
def left_root_of_tall():
    def rooted(roots):
        def chosen(self, grams):
            left, right = roots(self, grams)
            if self.tall:
                left = projected.Root(grams["gram"], epsilon=self.epsilon, power=0.5)
            return left, right

        return chosen

    replace(shampoo.Shampoo, "_roots", rooted)


@fault("the gaps of projections are reported as 0", "tab-shampoo", internal=True)
def no_gaps():
    def exact(minimize):
        def minimized(self, *arguments):
            center, gap = minimize(self, *arguments)
            return center, 0 * gap

        return minimized

    replace(projected.ProjectedLearner, "_minimize", exact)


@fault("learners with a projection ignore η", "tab-shampoo")
def eta_ignored():
    def built(init):
        def constructed(self, shape, *, eta=None, **options):
            init(self, shape, **options)

        return constructed

    replace(projected.ProjectedLearner, "__init__", built)


@fault("one-sided Shampoo projects in the Euclidean norm", "tab-shampoo", internal=True)
def euclidean_projection():
    def minimized(minimize):
        def flat(self, linear, left, right):
            largest = torch.linalg.eigvalsh(left)[..., -1:, None]
            eye = torch.eye(left.shape[-1], dtype=left.dtype)
            return minimize(self, linear, largest * eye, right)

        return flat

    replace(shampoo.OneSidedShampoo, "_minimize", minimized)


@fault("AdaGrad's diagonal root is ¼", "tab-adagrad", issue=True, internal=True)
def quarter_root():
    def rooted(metric):
        def diagonal(self, moment, delta):
            found = metric(self, moment, delta)
            if self.preconditioner != "diagonal":
                return found
            return found._replace(weight=delta.unsqueeze(-1) + moment**0.25)

        return diagonal

    replace(adagrad._AdaGrad, "_metric", rooted)


@fault("OGD's η × 3", "tab-adagrad", issue=True, internal=True)
def ogd_eta():
    replace(adagrad.AdaGradOGD, "_default_eta", lambda eta: lambda self: 3 * eta(self))


@fault("AdaGrad-FTRL without δ", "tab-adagrad", internal=True)
def ftrl_without_offset():
    adagrad.AdaGradFTRL._delta = lambda self, peak: torch.zeros_like(self.gaps)


@fault("scalar GBPA with η = 1", "tab-shampoo")
def scalar_eta():
    def built(init):
        def constructed(self, shape, **options):
            init(self, shape, **{"eta": 1.0, **options})

        return constructed

    replace(scalar_gbpa.ScalarGBPA, "__init__", built)


# ---- applications and costs


@fault(
    "the quasi-Newton gradient is not symmetrized", "app-quasi-newton", issue=True, internal=True
)
def unsymmetrized():
    def entered(self, direction, slope):
        x = self._action()
        residual = slope - self.half * (x @ direction)
        gradient = -torch.outer(residual, direction) / (2 * self.half)
        self.learner.observe(gradient)
        loss = residual.double().square().sum() / 2
        u, target = direction.double(), (self.center * direction + slope).double()
        self._losses = self._losses + loss
        self._outer = self._outer + torch.outer(u, u)
        self._cross = self._cross + torch.outer(target, u)
        self._square = self._square + target.square().sum()
        return loss

    quasi_newton.CurvatureLearner._enter = entered


@fault("quasi-Newton regret and bound: half of the unit", "app-quasi-newton", internal=True)
def half_of_the_unit():
    quasi_newton.CurvatureLearner._unit = property(lambda self: self.half**2)


@fault("the quasi-Newton loss of a matrix in hindsight × 2", "app-quasi-newton")
def hindsight_doubled():
    replace(
        quasi_newton.CurvatureLearner, "loss_of", lambda loss: lambda self, b: 2 * loss(self, b)
    )


@fault("rotations learn the inverse", "app-rotations")
def inverse_rotations():
    replace(
        rotations.OnlineRotations, "observe", lambda observe: lambda self, u, v: observe(self, v, u)
    )


@fault("the coupled root's flops without its last product", "cost-model")
def fewer_flops():
    def fewer(flops):
        return lambda rows, columns, *, steps: (
            flops(rows, columns, steps=steps) - 2.0 * rows**2 * columns
        )

    replace(theory, "coupled_flops", fewer)


# ---- the average of the iterates


@fault("the average is a fifth older", "thm-average")
def older_average():
    replace(average, "share", lambda share: lambda f, t: share(1.2 * f, t))


@fault("the average's weights are those of half its age", "thm-average", "average-schedule")
def younger_weights():
    replace(theory, "average_weights", lambda weights: lambda f, rounds: weights(f / 2, rounds))


@fault("the lengths of the steps are one, not Exp(1)", "thm-average")
def equal_steps():
    replace(noise, "exponential", lambda draw: lambda *a, **k: torch.ones_like(draw(*a, **k)))


@fault("the lengths of the steps are half as long", "thm-average")
def short_steps():
    replace(noise, "exponential", lambda draw: lambda *a, **k: draw(*a, **k) / 2)


@fault("the average's distance bound halved", "thm-average")
def near_average():
    replace(theory, "average_distance_bound", lambda bound: lambda *a: bound(*a) / 2)


@fault("the average's convex bound halved", "average-schedule")
def half_convex_bound():
    replace(theory, "average_constant_rate_bound", lambda b: lambda *a, **k: b(*a, **k) / 2)


@fault("the falling rate's bound falls like 1/T", "average-schedule")
def fast_convex_bound():
    replace(
        theory,
        "average_falling_rate_bound",
        lambda b: lambda power, rounds, **k: b(power, rounds, **k) / rounds**0.5,
    )


@fault("the average of the optimizers enters weights twice", "thm-average")
def doubled_share():
    replace(average, "share", lambda share: lambda f, t: (2 * share(f, t)).clamp_max(1.0))
