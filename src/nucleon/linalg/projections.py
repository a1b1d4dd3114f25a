"""Projections onto the operator-norm ball: in the Frobenius metric, and in a quadratic one.

The latter minimizes f(X) = ⟨S,X⟩ + ½Tr(XᵀLXR) over ‖X‖_op ≤ 1, to a duality gap. Three facts make
it cheap. The ball is invariant under rotations, so in the eigenbases of L and R the quadratic form
is diagonal and a gradient is elementwise. With R = I some minimizer has its rows in the row space
of S, so a wide problem shrinks to a square one. And the Gram matrix of the short side is all that a
projection needs, unless a singular value is far outside.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from nucleon import _checks
from nucleon.linalg._scaling import exponent, shift, unit_scale
from nucleon.linalg.roots import psd_eigh

_MODERATE = 100.0  # ‖X‖_F/radius up to which the Gram matrix resolves σ = radius to 1e-11


def project_operator_ball(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return the matrix of the ball ‖P‖_op ≤ `radius` nearest to `x` in the Frobenius norm.

    P = U min(Σ, radius) Vᵀ for x = UΣVᵀ, with ‖P‖_op ≤ radius up to the rounding of its entries to
    the dtype of `x`; a matrix inside the ball comes back unchanged.

    Args:
        x: matrices (…, m, n), float32, float64 or half; the work is done in float64.
        radius: of the ball, ≥ 0.
    """
    x = _checks.matrix("x", x)
    radius = _checks.nonnegative("radius", radius)
    copy = x.to(torch.float64, copy=True)  # a matrix inside is returned, and must not be x itself
    return clip(copy, radius).to(x.dtype) if x.numel() else x.clone()


def truncated(x: Tensor, limit: float | Tensor) -> Tensor:
    """Return U min(Σ, limit) Vᵀ without checks; a tensor has a limit per matrix, (…, 1)."""
    u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
    return (u * sigma.clamp(max=limit).unsqueeze(-2)) @ vt


def clip(x: Tensor, radius: float = 1.0) -> Tensor:
    """Return `project_operator_ball` of float64 without checks.

    It is X − U(1 − radius/Σ)₊UᵀX by the eigenvectors of the Gram matrix where those are exact.
    """
    norm = matrix_norm(x)
    moderate = 2.0**-400 <= radius <= 2.0**400  # the squares are far from the ends of the range
    if moderate and bool((norm <= radius).all()):
        return x
    if not (moderate and bool((norm <= _MODERATE * radius).all())):
        u, sigma, vt = torch.linalg.svd(unit_scale(x), full_matrices=False)
        sigma = shift(sigma, exponent(x).squeeze(-1))
        clipped = (u * sigma.clamp(max=radius).unsqueeze(-2)) @ vt
        return torch.where((sigma <= radius).all(-1)[..., None, None], x, clipped)
    if x.shape[-2] > x.shape[-1]:
        return clip(x.mT, radius).mT
    squares, u = torch.linalg.eigh(x @ x.mT)  # ascending: those outside the ball come last
    outside = int((squares > radius**2).sum(-1).max())
    if not outside:
        return x
    u, squares = u[..., -outside:], squares[..., -outside:]
    excess = (1 - radius * squares.clamp(min=radius**2).rsqrt()).unsqueeze(-2)
    return x - (u * excess) @ (u.mT @ x)


Solver = Literal["projected-gradient", "frank-wolfe", "douglas-rachford"]


@dataclass(frozen=True)
class QuadraticSolution:
    """A feasible point of the quadratic projection with a proof of how good it is.

    `value`, `gap` and `relative_gap` are float64, exact up to its rounding, and speak of the
    solution before it is rounded to the dtype of `s`.
    """

    x: Tensor
    """The solution (…, m, n), ‖x‖_op ≤ 1."""
    value: Tensor
    """f(x) = ⟨S,x⟩ + ½Tr(xᵀLxR), shape (…)."""
    gap: Tensor
    """An upper bound of f(x) − min f, shape (…): `frank_wolfe_gap` or, where smaller, the distance
    of f(x) to its minimum over all X, the sharper bound for a minimizer inside the ball."""
    frank_wolfe_gap: Tensor
    """max_{‖X‖_op ≤ 1} ⟨∇f(x), x−X⟩ = ⟨∇f(x),x⟩ + ‖∇f(x)‖_*, shape (…). It bounds f(x) − f(X) +
    ½‖X−x‖² in the norm of f, for every X of the ball, which is what a regret bound needs."""
    relative_gap: Tensor
    """gap/(−f(x)), at least (f(x) − min f)/|min f|; infinite while f(x) ≥ 0 is not optimal."""
    iterations: Tensor
    """Iterations after which `x` was found, int64, shape (…); 0 for a closed form or the start."""
    converged: Tensor
    """relative_gap ≤ tolerance, shape (…)."""


@torch.no_grad()
def quadratic_projection(
    s: Tensor,
    left: Tensor,
    right: Tensor | None = None,
    *,
    solver: Solver = "projected-gradient",
    tolerance: float = 1e-8,
    max_iterations: int = 5000,
    start: Tensor | None = None,
) -> QuadraticSolution:
    """Minimize ⟨S,X⟩ + ½Tr(XᵀLXR) over ‖X‖_op ≤ 1, to a duality gap.

    Every solver stops at gap ≤ tolerance·(−f(X)), where the gap bounds f(X) − min f from above. A
    minimizer in closed form (S = 0; L = 0; L and R multiples of I; the unconstrained minimizer when
    it is feasible) is returned without iterating.

    Args:
        s: the linear term S, (…, m, n); float64 inside whatever its dtype.
        left: L, symmetric positive semidefinite, (…, m, m); its batch shape may broadcast.
        right: R, symmetric positive semidefinite, (…, n, n). Default: the identity.
        solver: "projected-gradient" (accelerated, with adaptive restart), "frank-wolfe" (polar
            factors and exact line search) or "douglas-rachford" (alternates the exact minimizer of
            f plus a proximal term with the projection, by Anderson's extrapolation; the fastest
            when L is ill-conditioned).
        tolerance: on the relative gap, > 0.
        max_iterations: at most so many iterations, ≥ 1; `converged` says whether they sufficed.
        start: a first guess (…, m, n), projected onto the ball if outside.
    """
    s = _checks.matrix("s", s)
    left = _checks.acting_on("left", left, s)
    right = None if right is None else _checks.acting_on("right", right, s, side="columns")
    _checks.choice("solver", solver, _SOLVERS)
    tolerance = _checks.positive("tolerance", tolerance)
    max_iterations = _checks.count("max_iterations", max_iterations)
    if start is not None:
        start = _checks.matrix("start", start)
        _checks.same("start", start, "s", s)
        if start.shape != s.shape:
            raise ValueError(
                f"start must have the shape {tuple(s.shape)} of s, got {tuple(start.shape)}"
            )
    if not s.numel():
        zero = torch.zeros(s.shape[:-2], dtype=torch.float64, device=s.device)
        return QuadraticSolution(s.clone(), zero, zero, zero, zero, zero.long(), zero == 0)

    frame = _Frame.of(s, left, right)
    guess = None if start is None else frame.rotated(clip(start.double()))
    x, gaps, iterations = _solve(frame.problem, guess, _SOLVERS[solver], tolerance, max_iterations)

    batch = s.shape[:-2]
    value = frame.problem.value(x)
    frank_wolfe, gap = gaps
    relative = _relative(gap, value)
    scale = exponent(s.double()).flatten()
    return QuadraticSolution(
        x=frame.rotated_back(x).reshape(s.shape).to(s.dtype),
        value=shift(value, scale).reshape(batch),
        gap=shift(gap, scale).reshape(batch),
        frank_wolfe_gap=shift(frank_wolfe, scale).reshape(batch),
        relative_gap=relative.reshape(batch),
        iterations=iterations.reshape(batch),
        converged=(relative <= tolerance).reshape(batch),
    )


class _Problem(NamedTuple):
    """f(X) = ⟨linear, X⟩ + ½⟨X, weight∘X⟩ on a stack (b, m, n)."""

    linear: Tensor
    weight: Tensor

    def value(self, x: Tensor) -> Tensor:
        return _inner(x, self.linear + 0.5 * self.weight * x)

    def gradient(self, x: Tensor) -> Tensor:
        return self.linear + self.weight * x

    def gaps(self, x: Tensor) -> Tensor:
        """Return ⟨∇f,x⟩ + ‖∇f‖_* and the smaller of it and ½⟨∇f, ∇f/weight⟩ = f(x) − inf f, (2, b).

        Deep inside the ball rounding spoils the first, which weighs ∇f by the radius, not by x.
        """
        gradient = self.gradient(x)
        frank_wolfe = _inner(gradient, x) + torch.linalg.svdvals(gradient).sum(-1)
        free = torch.where(gradient == 0, 0.0, gradient * (gradient / self.weight))
        least = torch.minimum(frank_wolfe, free.sum((-2, -1)) / 2)
        return torch.stack([frank_wolfe, least]).clamp(min=0)

    def line_search(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the minimizer of f on the segment from x to target."""
        direction = target - x
        descent = -_inner(self.gradient(x), direction)
        curvature = _inner(direction, self.weight * direction)
        step = torch.where(descent < curvature, descent / curvature, 1.0).clamp(min=0)
        return x + step[:, None, None] * direction

    def closed_form(self) -> Tensor:
        """Return −polar(linear) where the weight is 0, else the projected unconstrained minimizer.

        It may or may not be optimal: its gap says so. Directions without weight stay at 0.
        """
        free = self.weight <= torch.finfo(self.weight.dtype).eps * _largest(self.weight)
        x = torch.where(free, 0.0, -self.linear / torch.where(free, 1.0, self.weight))
        x = self.line_search(torch.zeros_like(x), clip(x))
        flat = _largest(self.weight) == 0
        return torch.where(flat, -_polar(self.linear)[0], x) if bool(flat.any()) else x

    def take(self, index: Tensor) -> Self:
        return type(self)(*(part[index] for part in self))


class _Frame(NamedTuple):
    """The coordinates Uᵀ X V in which the problem is diagonal and of unit scale."""

    problem: _Problem
    left: Tensor
    right: Tensor | None

    @classmethod
    def of(cls, s: Tensor, left: Tensor, right: Tensor | None) -> Self:
        batch = s.shape[:-2]
        s, left, right = s.double(), left.double(), None if right is None else right.double()
        rows, u = psd_eigh(unit_scale(left))
        linear, weight = u.mT @ unit_scale(s), rows.unsqueeze(-1)
        power, v = exponent(left) - exponent(s), None
        if right is not None:
            columns, v = psd_eigh(unit_scale(right))
            weight, power = weight * columns.unsqueeze(-2), power + exponent(right)
        elif s.shape[-1] > s.shape[-2]:
            v = torch.linalg.qr(linear.mT).Q  # the row space of S
        if v is not None:
            linear = linear @ v
        # Beyond 2^±900 one of the two terms is lost in the rounding of the other.
        weight = shift(weight.expand_as(linear), power).clamp(max=2.0**900)
        weight = torch.where(weight < 2.0**-900, 0.0, weight)
        problem = _Problem(_stack(linear, batch), _stack(weight, batch))
        return cls(problem, _stack(u, batch), None if v is None else _stack(v, batch))

    def rotated(self, x: Tensor) -> Tensor:
        x = self.left.mT @ x.reshape(-1, *x.shape[-2:])
        return x if self.right is None else x @ self.right

    def rotated_back(self, x: Tensor) -> Tensor:
        x = self.left @ x
        return x if self.right is None else x @ self.right.mT


class _Iteration(ABC):
    """A solver on a stack: its point `x`, and a `proxy` that shrinks with the gap at x."""

    def __init__(self, problem: _Problem, x: Tensor) -> None:
        self.problem = problem
        self.x = self.ahead = x
        self.proxy = matrix_norm(x)

    @abstractmethod
    def step(self, k: int) -> None:
        """Run the k-th step, counted from 1."""

    def keep(self, index: Tensor) -> None:
        """Go on with these matrices of the stack only."""
        self.problem = self.problem.take(index)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[index])


class _ProjectedGradient(_Iteration):
    """Accelerated projected gradient with adaptive restart (O'Donoghue and Candès, 2015)."""

    def __init__(self, problem: _Problem, x: Tensor) -> None:
        super().__init__(problem, x)
        self.lipschitz = _largest(problem.weight)
        self.momentum = torch.ones_like(self.lipschitz)
        root = (problem.weight.amin((-2, -1), keepdim=True) / self.lipschitz).sqrt()
        self.most = (1 - root) / (1 + root)  # the best constant rate under strong convexity

    def step(self, k: int) -> None:
        ahead = self.ahead
        x = clip(ahead - self.problem.gradient(ahead) / self.lipschitz)
        # lipschitz·(ahead − x) − ∇f(ahead) lies in the normal cone at x, this far from −∇f(x).
        self.proxy = matrix_norm((self.lipschitz - self.problem.weight) * (ahead - x))
        move = x - self.x
        overshot = _inner(ahead - x, move)[:, None, None] > 0
        old = torch.where(overshot, 1.0, self.momentum)
        self.momentum = (1 + (1 + 4 * old**2).sqrt()) / 2
        self.ahead = x + torch.minimum((old - 1) / self.momentum, self.most) * move
        self.x = x


class _FrankWolfe(_Iteration):
    """Conditional gradient: towards −polar(∇f(x)) with exact line search (Jaggi, 2013)."""

    def step(self, k: int) -> None:
        self.x = self.ahead
        gradient = self.problem.gradient(self.x)
        polar, nuclear = _polar(gradient)
        self.proxy = _inner(gradient, self.x) + nuclear
        self.ahead = self.problem.line_search(self.x, -polar)


class _DouglasRachford(_Iteration):
    """Fixed point of v ↦ v + prox(2P(v) − v) − P(v) by Anderson's extrapolation.

    prox(y) minimizes f + ½·penalty·‖· − y‖², elementwise here. The penalty balances the primal and
    the dual residual (Boyd et al., 2011, §3.4.1) during the first steps and is fixed from then on.
    """

    memory, adaptive_steps, balance_every = 10, 10, 5

    def __init__(self, problem: _Problem, x: Tensor) -> None:
        super().__init__(problem, x)
        gradient = problem.gradient(x)
        # Where the constraint binds ‖X‖_op = 1, so this is the dual scale over the primal one.
        self.penalty = (matrix_norm(gradient) / matrix_norm(x).clamp(min=1))[:, None, None]
        self.v = x - gradient / self.penalty
        self.residual = self.image = torch.zeros_like(x.flatten(1))
        self.smallest = torch.full_like(self.proxy, torch.inf)
        self.residual_changes = x.new_zeros(len(x), self.memory, self.residual.shape[1])
        self.image_changes = torch.zeros_like(self.residual_changes)

    def step(self, k: int) -> None:
        v, x = self.v, clip(self.v)
        y = self.penalty * (2 * x - v) - self.problem.linear
        y = y / (self.problem.weight + self.penalty)
        # penalty·(v − x) lies in the normal cone at x, this far from −∇f(x).
        self.proxy = matrix_norm(self.problem.gradient(x) + self.penalty * (v - x))
        move, self.x, self.v = x - self.x, x, v + y - x
        if k > self.adaptive_steps:
            self._extrapolate(residual=(y - x).flatten(1), k=k)
        elif k % self.balance_every == 0:
            # Even out the two relative residuals; v − x is the dual variable over the penalty.
            primal = matrix_norm(y - x) / matrix_norm(x)
            dual = matrix_norm(move) / matrix_norm(v - x)
            factor = (primal / dual).sqrt().nan_to_num(1.0).clamp(0.1, 10.0)[:, None, None]
            self.penalty = self.penalty * factor
            self.v = self.x + (self.v - self.x) / factor

    def _extrapolate(self, residual: Tensor, k: int) -> None:
        """Set v − γ·Δv, γ minimizing ‖r − γ·Δr‖ over the recent steps; forget them if r grows."""
        image = self.v.flatten(1)
        if k > self.adaptive_steps + 1:
            self.residual_changes[:, k % self.memory] = residual - self.residual
            self.image_changes[:, k % self.memory] = image - self.image
        self.residual, self.image = residual, image
        size = torch.linalg.vector_norm(residual, dim=-1)
        grew = size > 2 * self.smallest
        self.smallest = torch.where(grew, size, torch.minimum(size, self.smallest))
        self.residual_changes[grew] = 0
        changes = self.residual_changes
        gram = changes @ changes.mT
        # The ridge makes an empty history harmless and a nearly dependent one benign.
        ridge = 1e-12 * gram.diagonal(dim1=-2, dim2=-1).sum(-1) + torch.finfo(gram.dtype).tiny
        gram = gram + ridge[:, None, None] * torch.eye(self.memory).to(gram)
        weights = torch.linalg.solve(gram, changes @ residual[..., None])
        self.v = self.v - (weights.mT @ self.image_changes).view_as(self.v)


_SOLVERS: dict[str, type[_Iteration]] = {
    "projected-gradient": _ProjectedGradient,
    "frank-wolfe": _FrankWolfe,
    "douglas-rachford": _DouglasRachford,
}


def _solve(
    problem: _Problem,
    guess: Tensor | None,
    solver: type[_Iteration],
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best point of every matrix of the stack, its gaps and its iteration."""
    best = problem.closed_form()
    if guess is not None:
        guess = problem.line_search(torch.zeros_like(guess), guess)
        better = problem.value(guess) < problem.value(best)
        best = torch.where(better[:, None, None], guess, best)
    gaps = problem.gaps(best)
    iterations = torch.zeros_like(gaps[1], dtype=torch.long)
    # Without weight the closed form is the minimizer: iterating cannot improve on its rounding.
    exact = _largest(problem.weight).flatten() == 0
    running = (~exact & ~(_relative(gaps[1], problem.value(best)) <= tolerance)).nonzero().flatten()
    if not len(running):
        return best, gaps, iterations

    iteration = solver(problem.take(running), best[running])
    # A gap costs a nuclear norm: measure it only where the proxy says that it may suffice. Their
    # ratio tends to fall; believing so costs a few measurements and saves many late stops.
    ratio = torch.zeros_like(gaps[1])
    for k in range(1, max_iterations + 1):
        iteration.step(k)
        ratio *= 0.9
        threshold = -tolerance * iteration.problem.value(iteration.x)
        due = (ratio[running] * iteration.proxy <= threshold) | (k == max_iterations)
        if not bool(due.any()):
            continue
        due = due.nonzero().flatten()
        measured, index = iteration.problem.take(due).gaps(iteration.x[due]), running[due]
        ratio[index] = measured[1] / iteration.proxy[due]
        better = measured[1] < gaps[1, index]
        improved = index[better]
        best[improved], gaps[:, improved] = iteration.x[due[better]], measured[:, better]
        iterations[improved] = k
        done = torch.zeros_like(running, dtype=torch.bool)
        done[due] = measured[1] <= threshold[due]
        if bool(done.any()):
            keep = (~done).nonzero().flatten()
            if not len(keep):
                break
            running = running[keep]
            iteration.keep(keep)
    return best, gaps, iterations


def _relative(gap: Tensor, value: Tensor) -> Tensor:
    """Return gap/(−value), infinite for a value ≥ 0 unless the gap is 0."""
    relative = torch.where(value < 0, gap / -value, torch.inf)
    return torch.where(gap == 0, 0.0, relative)


def _polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the partial isometry of the numerical rank of x, and ‖x‖_*."""
    u, sigma, vt = torch.linalg.svd(x, full_matrices=False)
    kept = sigma > max(x.shape[-2:]) * torch.finfo(x.dtype).eps * sigma[..., :1]
    return (u * kept.unsqueeze(-2)) @ vt, sigma.sum(-1)


def _stack(x: Tensor, batch: torch.Size) -> Tensor:
    """Return (…, m, n), repeated over the batch shape and flattened to (b, m, n)."""
    return x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-2, -1))


def _largest(x: Tensor) -> Tensor:
    return x.amax((-2, -1), keepdim=True)
