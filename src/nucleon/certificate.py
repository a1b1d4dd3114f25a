"""A regret beside its bound: the certificate, and the bound of Theorem 3.2 with its constants.

Learners and optimizers share it. Throughout, `gram` is M̂_T = Σ γ^{2(T-t)} G_tG_tᵀ on the short
side, (…, m, m), and a bound, of the batch's shape, is on the regret Σ γ^{T-t}⟨G_t, X_t⟩ + D‖Ĝ_T‖_*:
γ^T times the plain bound on the stream γ^{-t}G_t, whose gradient bound grows as Gγ^{-(t+1)}.

The proof of Theorem 3.2 uses G only through L_{t+1} ⪰ L_t and L_t² = G²I + M_t ⪰ M_{t+1}, t ≥ 1.
So G may grow, as long as G_t ≥ ‖G_{t+1}‖_op; the bound then holds with the last one.

A gradient above the bound in force, ‖G_{t+1}‖_op > G_t, split as Ḡ + E with ‖Ḡ‖_op ≤ G_t, costs at
most 2D‖E‖_* more. Clipped (the learner is fed Ḡ): ⟨E, X_t − X⟩ ≤ 2D‖E‖_*. Not clipped (the bound
grows a round late): Ψ is 1-Lipschitz in the nuclear norm, so its Bregman divergence satisfies
B(S+Ḡ+E‖S) ≤ B(S+Ḡ‖S) + 2‖E‖_*, and L_t² ⪰ M_t + ḠḠᵀ still bounds the first part. Either way
`excess` = Σ γ^{T-t}‖E_t‖_* makes the bound unconditional, and for a running maximum it telescopes.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import _checks

Real = float | Tensor
"""A number, or one per game as a tensor that broadcasts to the batch."""


@dataclass(frozen=True)
class Admissibility:
    """The constants (α, β) of Definition 3.1; αβ ≥ ½ for every admissible smoothing."""

    alpha: float
    """Upper stability: Ψ(S; L₂) − Ψ(S; L₁) ≤ α(Tr L₂ − Tr L₁) for 0 ⪯ L₁ ⪯ L₂."""
    beta: float
    """Smoothness: Ψ(Y) − Ψ(X) − ⟨∇Ψ(X), Y−X⟩ ≤ (β/2) Tr (Y−X)ᵀL⁻¹(Y−X) for L ≻ 0."""

    @property
    def product(self) -> float:
        """αβ, which alone determines the best regret bound."""
        return self.alpha * self.beta

    @property
    def eta(self) -> float:
        """η = √(α/β), the scale of the smoothing that makes the regret bound smallest."""
        return math.sqrt(self.alpha / self.beta)


def gbpa_bound(
    gram: Tensor,
    *,
    radius: float,
    gradient_bound: Real,
    alpha: float,
    beta: float,
    first_nuclear: Real,
    discount: float = 1.0,
    rounds: int | None = None,
    eta: float | None = None,
    excess: Real = 0.0,
) -> Tensor:
    """Bound the regret of GBPA with an (α, β)-admissible smoothing (Theorem 3.2).

    Reg_T ≤ D((βη + α/η) Tr√(G²γ^{-2}I + M̂_T) + (1 − βη) γ^{T-1}‖G_1‖_* + 2·excess)

    With η = √(α/β), the default, βη + α/η = 2√(αβ). For βη > 1 the first gradient's term is
    negative and still valid: the Bregman terms start at the second round and so sum to at most
    βη(Tr√M_T − ‖G_1‖_*). `first_nuclear` must then not exceed ‖G_1‖_* (0 is safe).

    Args:
        gram: M̂_T, (…, m, m).
        radius: D.
        gradient_bound: G, or the last one where it grew.
        alpha: upper stability constant.
        beta: smoothness constant.
        first_nuclear: ‖G_1‖_* of the first gradient, undiscounted.
        discount: γ in (0, 1], 1.0 for plain regret.
        rounds: T, counted from the first gradient; needed when γ < 1.
        eta: η, None for √(α/β).
        excess: Σ γ^{T-t}‖E_t‖_* of the parts above the bound in force (0.0).
    """
    radius = _checks.positive("radius", radius)
    eta = checked_eta(eta, alpha, beta)
    root = preconditioner_trace(gram, gradient_bound=gradient_bound, discount=discount)
    first = real("first_nuclear", first_nuclear, root)
    if rounds is not None:
        first = first * discount ** (_checks.count("rounds", rounds) - 1)
    elif discount != 1.0:
        raise ValueError(f"rounds is needed to discount the first gradient by {discount!r}")
    regret = (beta * eta + alpha / eta) * root + (1 - beta * eta) * first
    return radius * (regret + 2 * real("excess", excess, root))


def preconditioner_trace(gram: Tensor, *, gradient_bound: Real, discount: float = 1.0) -> Tensor:
    """Return Tr L_T = Tr √(G²γ^{-2}I + M̂_T), to which the bound of Theorem 3.2 is proportional."""
    discount = _checks.fraction("discount", discount, closed="1")
    eigenvalues = spectrum("gram", gram)
    bound = real("gradient_bound", gradient_bound, eigenvalues.sum(-1)) / discount
    return (bound.square().unsqueeze(-1) + eigenvalues).sqrt().sum(-1)


def ftpl_constants(rows: int, width: int) -> tuple[float, float]:
    """Return (α, β) = (√m + √n', 1/√(n'−m−1)) of the stochastic smoothing (Theorem 4.1)."""
    check_width(rows, width)
    return math.sqrt(rows) + math.sqrt(width), 1 / math.sqrt(width - rows - 1)


def padded_width(rows: int, columns: int) -> int:
    """Return max(n, 2m, m+2), where the dimensional factor (n′/(n′−m−1))^¼ is at most √2."""
    return max(columns, 2 * rows, rows + 2)


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """The regret of a game beside the bound of its theorem, both from the ledger's sums."""

    regret: Tensor
    """Reg_T in float64, shape () or (b,)."""
    bound: Tensor
    """The theorem's bound for the gradients that came, of the same shape; infinite without one."""
    theorem: str
    """The theorem, or "none"."""
    refusal: str | None = None
    """Why the theorem does not apply to this game; None where it does."""
    largest: Tensor | None = None
    """An upper bound of every ‖G_t‖_op."""
    excess: Tensor | None = None
    """2DΣγ^{T-t}‖E_t‖_*, which the parts E_t of gradients above `gradient_bound` added to the
    bound; None where the learner has no such bound."""
    gradient_bound: Tensor | None = None
    """G, the last one where it grew."""
    lower: Tensor | None = None
    """D√(Σγ^{2(T-t)}‖G_t‖_F²/2): an adversary free to flip the signs of the gradients could force
    at least this regret on every learner, see `forced_regret`."""
    skipped: int = 0
    """Steps left out of the regret, as their gradients were not finite."""

    @property
    def slack(self) -> Tensor:
        """Bound − regret."""
        return self.bound - self.regret

    @property
    def share(self) -> Tensor:
        """Regret/bound: 1 where the bound is attained, NaN where both are 0."""
        return self.regret / self.bound

    @property
    def holds(self) -> bool:
        """True if the theorem applies and the regret of every game is within a finite bound."""
        finite = self.regret.isfinite() & self.bound.isfinite()
        return self.refusal is None and bool((finite & (self.slack >= 0)).all())

    def __repr__(self) -> str:
        """Return the verdict, and statements on the game nearest to its bound."""
        worst, games = int(self.slack.argmin()), self.regret.numel()

        def of(values: Tensor) -> float:
            return values.flatten()[min(worst, values.numel() - 1)].item()

        verdict = "holds" if self.holds else "does not hold: the regret is above the bound"
        if self.refusal is not None:
            verdict = f"does not hold: {self.refusal}"
        regret, bound = of(self.regret), of(self.bound)
        share = f", {100 * regret / bound:.3g}% of the bound" if 0 < bound < math.inf else ""
        which = f"; of {games} games number {worst} is nearest to its bound" if games > 1 else ""
        rows = {"regret": f"{regret:.6g}{share}{which}", "bound": f"{bound:.6g}"}
        rows["theorem"] = self.theorem
        if self.largest is not None:
            rows["gradients"] = self._gradients(of(self.largest), of)
        if self.lower is not None:
            forced = f"{of(self.lower):.3g}"
            rows["adversary"] = f"Flipping signs of these gradients could force {forced}."
        if self.skipped:
            rows["skipped"] = f"Steps left out of the regret, as not finite: {self.skipped}."
        lines = {"Certificate ": verdict, **{f"  {n:<10}": text for n, text in rows.items()}}
        return "\n".join(
            textwrap.fill(text, 88, initial_indent=start, subsequent_indent=" " * 12)
            for start, text in lines.items()
        )

    def _gradients(self, largest: float, of: Callable[[Tensor], float]) -> str:
        """Return a sentence on the norms beside the stated bound."""
        if self.excess is None or self.gradient_bound is None or not of(self.gradient_bound):
            return f"No norm is above {largest:.6g}."
        limit, added = of(self.gradient_bound), of(self.excess)
        if not added:
            return f"Every norm is within gradient_bound={limit:.6g}, the largest {largest:.6g}."
        above = f"{100 * (largest / limit - 1):.3g}%; that added {added:.3g} to the bound."
        if largest <= limit * (1 + 1e-3):  # `largest` is an upper bound, and no sharper than that
            return f"Every norm is within gradient_bound={limit:.6g} but for at most {above}"
        return f"Norms of up to {largest:.6g} exceed gradient_bound={limit:.6g}, by {above}"


def forced_regret(gram: Tensor, radius: float = 1.0) -> Tensor:
    """Return D√(Tr M̂/2), which an adversary can force by choosing the signs of the gradients.

    Under independent signs ε_t the mean gain of every learner is zero. Its mean regret is therefore
    D·E‖Σγ^{T-t}ε_tG_t‖_*, at least D times the mean Frobenius norm. That mean is at least 1/√2 of
    the root of the mean square (Latała and Oleszkiewicz 1994).
    """
    return radius * (gram.diagonal(dim1=-2, dim2=-1).sum(-1) / 2).sqrt()


def checked_eta(eta: float | None, alpha: float, beta: float, dimension: int = 1) -> float:
    """Return η, by default √(α·dimension/β); raise if αβ < ½, which no smoothing has."""
    alpha, beta = _checks.positive("alpha", alpha), _checks.positive("beta", beta)
    if alpha * beta < 0.5 * (1 - 1e-12):  # room for the rounding of a product that is exactly ½
        raise ValueError(
            f"alpha * beta must be at least 1/2, got {alpha!r} * {beta!r} = {alpha * beta:.6g}; "
            f"no smoothing of the nuclear norm does better (Proposition 3.3)"
        )
    return math.sqrt(alpha * dimension / beta) if eta is None else _checks.positive("eta", eta)


def spectrum(name: str, gram: Tensor) -> Tensor:
    """Return the eigenvalues (…, m) of the Gram matrix (…, m, m) in float64, clipped at 0.

    A sum of many rounded products drifts from semidefinite by more than one rounding.
    """
    x = _checks.decomposable(_checks.symmetric(name, gram))
    return torch.linalg.eigvalsh(x.double()).clamp(min=0)


def real(name: str, value: Real, batch: Tensor) -> Tensor:
    """Return `value` ≥ 0 in float64, a scalar or a tensor that broadcasts to `batch`."""
    if not isinstance(value, Tensor):
        number = _checks.nonnegative(name, value)
        return torch.as_tensor(number, dtype=torch.float64, device=batch.device)
    _checks.broadcastable(name, value.shape, "the batch", batch.shape)
    if (_checks.finite(name, value) < 0).any():
        raise ValueError(f"{name} must be ≥ 0, its smallest entry is {value.min().item():.3g}")
    return value.to(device=batch.device, dtype=torch.float64)


def check_width(rows: int, width: int) -> None:
    """Check that width ≥ rows + 2, as the constants of Theorem 4.1 need."""
    if _checks.count("width", width) < _checks.count("rows", rows) + 2:
        raise ValueError(
            f"width must be at least rows + 2 = {rows + 2}, got {width}; pad with zero columns"
        )
