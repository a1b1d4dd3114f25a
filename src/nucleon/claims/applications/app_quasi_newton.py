"""app-quasi-newton: curvature learned online, in an optimizer (Appendix A)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nucleon.claims.applications import needed
from nucleon.claims.applications.app_rotations import ProjectedDescent
from nucleon.claims.beside import EXACT, ROUNDS, close
from nucleon.claims.engine import Check, Claim, Item, Row, Run, at_least, at_most, below
from nucleon.claims.oracle import curvature
from nucleon.claims.oracle.algebra import Array
from nucleon.claims.shown import Figure, Panel, Series
from nucleon.online.learners import FAML, Learner, ScalarGBPA
from nucleon.online.problems.quasi_newton import (
    RUNNING_FAML,
    CurvatureLearner,
    Minimum,
    online_quasi_newton,
)

F64 = torch.float64
TOLERANCE = 1e-8
ROUNDING = 1e-12  # eigenvalues of a B_t of norm L in float64 are good to 1e-14·L
MOST_ITERATIONS = 100_000
LEAST_SHARE = 0.05
"""Share of FAML's bound with G = 1, which pairs of one Hessian are far from making it pay."""

LEARNERS: Mapping[str, Callable[..., Learner]] = {
    "online, FAML": RUNNING_FAML,
    "online, FAML, bound 1": FAML,
    "online, scalar GBPA": ScalarGBPA,
    "online, OGD": ProjectedDescent,
}
STYLES = {"online, FAML": 4, "gradient descent": 6, "SciPy BFGS": 0, "SciPy L-BFGS-B": 2}


@dataclass(frozen=True)
class Objective:
    """f with μI ⪯ ∇²f ⪯ LI, its gradient and a start."""

    name: str
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    start: Tensor
    mu: float
    L: float
    hessian: Tensor | None = None
    """The Hessian, where it is constant."""


def minimized(
    history: Sequence[float], evaluations: int, minimum: Minimum | None = None
) -> dict[str, Any]:
    """Return the fields of a method's row, from ‖∇f‖₂ at each iterate and the gradients taken."""
    counts = {"iterations": len(history) - 1, "evaluations": evaluations, "final": history[-1]}
    return {**counts, "_history": history, "_minimum": minimum}


def quadratic(dimension: int, condition: float, seed: int) -> Objective:
    """Return ½(x − x*)ᵀH(x − x*) with eigenvalues from 1 down to 1/condition in equal ratios."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(dimension + 1, dimension, dtype=F64, generator=generator)
    basis = torch.linalg.qr(normal[1:]).Q
    values = torch.logspace(0, -math.log10(condition), dimension, dtype=F64)
    hessian, best = (basis * values) @ basis.mT, normal[0]
    hessian = (hessian + hessian.mT) / 2

    def gradient(x: Tensor) -> Tensor:
        return hessian @ (x - best)

    def value(x: Tensor) -> Tensor:
        return (x - best) @ gradient(x) / 2

    name = f"quadratic, n = {dimension}, L/μ = {condition:g}"
    return Objective(name, value, gradient, torch.zeros_like(best), 1 / condition, 1.0, hessian)


def digits(penalty: float) -> Objective:
    """Return logistic regression of scikit-learn's digits, 0–4 against 5–9, with penalty‖w‖²/2.

    The 61 pixels that vary, standardized, and a constant. ∇²f = mean σ(1−σ)aaᵀ + penalty·I, so
    μ = penalty and L = ‖A‖²_op/(4N) + penalty.
    """
    data = needed("sklearn.datasets", "scikit-learn").load_digits()
    pixels = torch.from_numpy(data.data).double()
    pixels = pixels[:, pixels.std(0) > 0]
    features = (pixels - pixels.mean(0)) / pixels.std(0)
    features = torch.cat([features, torch.ones(len(features), 1, dtype=F64)], 1)
    signed = features * torch.where(torch.from_numpy(data.target) >= 5, 1.0, -1.0)[:, None]
    steepest = torch.linalg.matrix_norm(features, 2).item() ** 2 / (4 * len(features))

    def gradient(w: Tensor) -> Tensor:
        return penalty * w - signed.mT @ torch.sigmoid(-(signed @ w)) / len(signed)

    def value(w: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-(signed @ w)).mean() + penalty * (w @ w) / 2

    L = steepest + penalty
    name = f"digits, n = {signed.shape[1]}, L/μ = {L / penalty:.0f}"
    return Objective(name, value, gradient, signed.new_zeros(signed.shape[1]), penalty, L)


def online(objective: Objective, method: str) -> dict[str, Any]:
    minimum = online_quasi_newton(
        objective.gradient,
        objective.start,
        mu=objective.mu,
        L=objective.L,
        learner=LEARNERS[method],
        tolerance=TOLERANCE,
        max_iterations=MOST_ITERATIONS,
    )
    return minimized(minimum.history, minimum.evaluations, minimum)


def descent(objective: Objective) -> dict[str, Any]:
    """Minimize by gradient descent with the best fixed step: x ← x − 2/(μ+L)·∇f(x)."""
    step, x, history = 2 / (objective.mu + objective.L), objective.start, list[float]()
    while len(history) <= MOST_ITERATIONS and (not history or history[-1] > TOLERANCE):
        slope = objective.gradient(x)
        history.append(torch.linalg.vector_norm(slope).item())
        x = x - step * slope
    return minimized(history, len(history))


def scipy_run(objective: Objective, method: str) -> dict[str, Any]:
    """Minimize by SciPy, stopped by the 2-norm at its own iterates: gtol is on the ∞-norm."""
    norms: dict[bytes, float] = {}
    history: list[float] = []

    def both(x: Any) -> tuple[float, Any]:
        point = torch.from_numpy(x)
        slope = objective.gradient(point)
        norms[x.tobytes()] = torch.linalg.vector_norm(slope).item()
        return objective.value(point).item(), slope.numpy()

    def look(intermediate_result: Any) -> None:
        history.append(norms[intermediate_result.x.tobytes()])
        if history[-1] <= TOLERANCE:
            raise StopIteration

    minimize, start = needed("scipy.optimize", "scipy").minimize, objective.start.numpy()
    options: dict[str, Any] = {"gtol": 0.0, "maxiter": MOST_ITERATIONS}
    if method == "L-BFGS-B":
        options.update(ftol=0.0, maxfun=MOST_ITERATIONS)
    minimize(both, start, jac=True, method=method, callback=look, options=options)
    return minimized([norms[start.tobytes()], *history], len(norms))


METHODS: Mapping[str, Callable[[Objective], dict[str, Any]]] = {
    **{name: partial(online, method=name) for name in LEARNERS},
    "gradient descent": descent,
    "SciPy BFGS": partial(scipy_run, method="BFGS"),
    "SciPy L-BFGS-B": partial(scipy_run, method="L-BFGS-B"),
}
QUICK = [name for name in METHODS if name not in ("online, scalar GBPA", "online, OGD")]


def oracle_checks(seed: int) -> Iterator[Check]:
    """Check both FAMLs on a few pairs of a Hessian: B_t, and all that is in units of the losses."""
    mu, L, n = 0.1, 2.0, 6
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(ROUNDS + n, n, dtype=F64, generator=generator)
    basis = torch.linalg.qr(drawn[:n]).Q
    hessian = (basis * torch.linspace(mu, L, n, dtype=F64)) @ basis.mT
    hessian, other = (hessian + hessian.mT) / 2, L * torch.eye(n, dtype=F64)
    pairs = [(s, hessian @ s) for s in drawn[n:]]
    arrays = [(s.numpy(), y.numpy()) for s, y in pairs]
    matrices, sums = list[Array](), list[float]()
    for learner, running in ((FAML, False), (RUNNING_FAML, True)):
        learned = CurvatureLearner(n, mu=mu, L=L, learner=learner, dtype=F64)
        mine = list[Tensor]()
        for s, y in pairs:
            mine.append(learned.matrix())
            learned.observe(s, y)
        twin = curvature.play(arrays, mu=mu, L=L, running=running)
        matrices.append((torch.stack(mine).numpy() - twin.matrices) / L)
        certificate = learned.certificate()
        of_other = sum(curvature.loss(pair, other.numpy()) for pair in arrays)
        sums += [
            certificate.regret.item() / twin.regret - 1,
            certificate.bound.item() / twin.bound - 1,
            learned.loss.item() / twin.loss - 1,
            learned.loss_of(other).item() / of_other - 1,
        ]
    yield close("B_t against the reference's, over L", *matrices)
    yield close("regret, bound and losses against the reference's", *sums)


def learned_checks(words: str, objective: Objective, learned: CurvatureLearner) -> Iterator[Check]:
    certificate = learned.certificate()
    regret = certificate.regret.item() if certificate.refusal is None else math.nan
    yield at_most(f"{words}: regret", regret, certificate.bound.item())
    values = torch.linalg.eigvalsh(learned.matrix())
    outside = max(objective.mu - values[0].item(), values[-1].item() - objective.L)
    yield at_most(f"{words}: B_T outside [μ, L], over L", outside / objective.L, ROUNDING)
    if objective.hessian is not None:
        excess = learned.loss - learned.loss_of(objective.hessian)
        yield at_most(f"{words}: loss above the Hessian's", excess, regret)


def measure(run: Run) -> Iterator[Item]:
    objectives = [quadratic(50, 1e2 if run.quick else 1e3, run.seed), digits(1e-2)]
    if not run.quick:
        objectives += [quadratic(200, 1e2, run.seed), digits(1e-3)]
    points = [
        {"objective": objective.name, "method": method, "_objective": objective}
        for objective in objectives
        for method in (QUICK if run.quick else METHODS)
    ]
    rows = run.each(points, lambda _objective, method: METHODS[method](_objective))
    for objective in objectives:
        tried = rows.where(objective=objective.name)
        baseline = tried.one(method="gradient descent").evaluations
        for row in tried:
            words = f"{objective.name}, {row.method}"
            yield at_most(f"{words}: ‖∇f‖ reached", row.final, TOLERANCE)
            if row._minimum is not None:
                yield from learned_checks(words, objective, row._minimum.curvature)
                if "OGD" not in row.method:  # it is within its bound, but its trials fail
                    yield below(f"{words}: gradients", row.evaluations, baseline)
    first = rows.one(objective=objectives[0].name, method="online, FAML, bound 1")
    certificate = first._minimum.curvature.certificate()
    share = certificate.regret / certificate.bound
    yield at_least(f"{first.objective}, {first.method}: regret/bound", share, LEAST_SHARE)
    yield from oracle_checks(run.seed)
    columns = {n: n for n in ("objective", "method", "iterations")} | {"gradients": "evaluations"}
    yield rows.listing(f"To ‖∇f‖₂ ≤ {TOLERANCE:g}", columns)

    def line(row: Row) -> Series:
        kept = sorted({round(row.iterations ** (k / 150)) for k in range(151)})
        logs = [math.log10(row._history[t]) for t in kept]  # nine decades crowd a logarithmic axis
        return Series(row.method, [float(t) for t in kept], logs, style=STYLES[row.method])

    def panel(o: Objective) -> Panel:
        lines = rows.where(lambda row: row.method in STYLES, objective=o.name)
        return Panel(o.name, "iteration", "log₁₀ ‖∇f‖", tuple(map(line, lines)), x_scale="log")

    yield Figure(
        "quasi-newton",
        "Curvature learned online: the gradient norm along the way",
        "The online method computes one gradient per iteration, two if it falls back.",
        tuple(map(panel, objectives)),
    )
    yield """
        A round costs an eigendecomposition and a factorization, O(n³), against BFGS's O(n²) and
        L-BFGS's O(n): in time the others are ahead unless gradients are dear. The method needs μ
        and L, which SciPy does not, but no line search and no values of f.

        SciPy stops by the ∞-norm; here every method is stopped at its first iterate with ‖∇f‖₂ ≤
        1e-8. The running bound is certified on the condition that it states; with the bound 1,
        which μ and L imply, the certificate is unconditional, and the start slower.
    """


CLAIM = Claim(
    id="app-quasi-newton",
    title="Quasi-Newton steps with curvature learned online",
    statement=(
        "Matrices B_t between μI and LI learned from (s, y) pairs by a learner of the unit ball "
        "keep its regret bound, and steps with them converge faster than gradient descent."
    ),
    place="Appendix A, online learning for quasi-Newton methods",
    tolerance=(
        "On every objective ‖∇f‖₂ reaches 1e-8, every learner is within its bound on the "
        "linearized regret, B_T is between μI and LI to rounding, and on a quadratic the losses "
        "are within the regret of the Hessian's; FAML and scalar GBPA take fewer gradients than "
        "gradient descent. On the first objective FAML's regret is at least "
        f"{LEAST_SHARE:g} of its bound; on a few pairs B_t, the losses, the regret and its bound, "
        f"in units of the losses, are the reference's to {EXACT:g}."
    ),
    measure=measure,
    seconds=(50, 2),
)
