"""A regret beside its bound: the certificate, and the bound of Theorem 3.2 with its constants.

Learners and optimizers share it. Throughout, `gram` is M̂_T = Σ γ^{2(T-t)} G_tG_tᵀ on the short
side, (…, m, m), and a bound has the batch's shape: one on Σ γ^{T-t}⟨G_t, X_t⟩ + D‖Ĝ_T‖_*. It is γ^T
times the plain bound on the stream γ^{-t}G_t, whose gradient bound grows as Gγ^{-(t+1)}.

The proof of Theorem 3.2 uses G only through L_{t+1} ⪰ L_t and L_t² = G²I + M_t ⪰ M_{t+1}, t ≥ 1.
So G may grow, as long as G_t ≥ ‖G_{t+1}‖_op; the bound then holds with the last one.

A gradient above the bound in force, ‖G_{t+1}‖_op > G_t, split as Ḡ + E with ‖Ḡ‖_op ≤ G_t, costs at
most 2D‖E‖_* more. Clipped (the learner is fed Ḡ): ⟨E, X_t − X⟩ ≤ 2D‖E‖_*. Not clipped (the bound
grows a round late): Ψ is 1-Lipschitz in the nuclear norm, so its Bregman divergence satisfies
B(S+Ḡ+E‖S) ≤ B(S+Ḡ‖S) + 2‖E‖_*, and L_t² ⪰ M_t + ḠḠᵀ still bounds the first part. Either way
`excess` = Σ γ^{T-t}‖E_t‖_* makes the bound unconditional, and for a running maximum it telescopes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nucleon import _checks

Real = float | Tensor
"""A number, or one per game as a tensor that broadcasts to the batch."""
PROMISE = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far outside the ball rounding may take an action, relative to the radius, by its dtype."""


@dataclass(frozen=True)
class Admissibility:
    """The constants (α, β) of Definition 3.1; αβ ≥ ½ for every admissible smoothing."""

    alpha: float
    """Upper stability: Ψ(S; L₂) − Ψ(S; L₁) ≤ α(Tr L₂ − Tr L₁) for 0 ⪯ L₁ ⪯ L₂."""
    beta: float
    """Smoothness: Ψ(Y) − Ψ(X) − ⟨∇Ψ(X), Y−X⟩ ≤ (β/2) Tr (Y−X)ᵀL⁻¹(Y−X) for L ≻ 0."""

    @property
    def product(self) -> float:
        """αβ, all that the regret depends on."""
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
    """Regret of GBPA with an (α, β)-admissible smoothing (Theorem 3.2).

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
        excess: Σ γ^{T-t}‖E_t‖_*, what lay above the bound in force, 0.0 when nothing did.
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
    """Tr L_T = Tr √(G²γ^{-2}I + M̂_T), what every bound of this family grows with (Theorem 3.2)."""
    discount = _checks.fraction("discount", discount, closed="1")
    eigenvalues = spectrum("gram", gram)
    bound = real("gradient_bound", gradient_bound, eigenvalues.sum(-1)) / discount
    return (bound.square().unsqueeze(-1) + eigenvalues).sqrt().sum(-1)


def ftpl_constants(rows: int, width: int) -> tuple[float, float]:
    """(α, β) = (√m + √n', 1/√(n'−m−1)) of the stochastic smoothing (Theorem 4.1)."""
    check_width(rows, width)
    return math.sqrt(rows) + math.sqrt(width), 1 / math.sqrt(width - rows - 1)


def padded_width(rows: int, columns: int) -> int:
    """Return max(n, 2m, m+2), where the dimensional factor (n′/(n′−m−1))^¼ is at most √2."""
    return max(columns, 2 * rows, rows + 2)


@dataclass(frozen=True, eq=False)
class Certificate:
    """A regret beside the bound that a theorem puts on it, and how tight that is."""

    regret: Tensor
    """Reg_T in float64, shape () or (b,)."""
    bound: Tensor
    """The theorem's bound, of the same shape; infinite where there is none."""
    theorem: str
    """The theorem and, where it matters, the form of it."""
    conditional_on: tuple[str, ...] = ()
    """What has to be true besides what was checked, in words."""
    refusal: str | None = None
    """Why the theorem does not apply to this game; None where it does."""
    lower: Tensor | None = None
    """What the same gradients with some other signs cost every learner, see `Ledger.lower`."""

    def __post_init__(self) -> None:
        if self.regret.shape != self.bound.shape:
            raise ValueError(
                f"regret and bound must have one entry per game each, got the shapes "
                f"{tuple(self.regret.shape)} and {tuple(self.bound.shape)}"
            )

    @property
    def slack(self) -> Tensor:
        """Bound − regret."""
        return self.bound - self.regret

    @property
    def tightness(self) -> Tensor:
        """Regret/bound: 1 where the bound is attained, NaN where both are 0."""
        return self.regret / self.bound

    @property
    def lower_share(self) -> Tensor | None:
        """Lower/bound, below which no learner's bound can come; None where it is not known."""
        return None if self.lower is None else self.lower / self.bound

    @property
    def holds(self) -> bool:
        """Whether the theorem applies and every game has a finite bound and is within it."""
        known = self.regret.isfinite() & self.bound.isfinite()
        return self.refusal is None and bool((known & (self.slack >= 0)).all())

    @property
    def conditions(self) -> str:
        """What has to be true besides what was checked, as one clause."""
        return "provided that " + ", and that ".join(self.conditional_on)

    def __str__(self) -> str:
        """One line on the game with the least slack."""
        worst = int(self.slack.argmin())
        regret, bound = self.regret.flatten()[worst].item(), self.bound.flatten()[worst].item()
        line = f"regret {regret:.6g} {'≤' if regret <= bound else '>'} bound {bound:.6g}"
        if self.refusal is not None:
            return f"{line} of {self.theorem}; not certified: {self.refusal}"
        if bound > 0:
            line += f" ({100 * regret / bound:.3g}% of it)"
        parts = [f"{line}, by {self.theorem}"]
        if self.lower is not None:
            least = self.lower.flatten()[worst].item()
            parts.append(
                f"no learner can guarantee less than {least:.3g} for these gradients, whose signs "
                f"may change"
            )
        if self.conditional_on:
            parts.append(self.conditions)
        return "; ".join(parts)


def checked_eta(eta: float | None, alpha: float, beta: float, dimension: int = 1) -> float:
    """Return η, √(α·dimension/β) by default; raise on constants that no smoothing has."""
    alpha, beta = _checks.positive("alpha", alpha), _checks.positive("beta", beta)
    if alpha * beta < 0.5 * (1 - 1e-12):  # room for the rounding of a product that is exactly ½
        raise ValueError(
            f"alpha * beta must be at least 1/2, got {alpha!r} * {beta!r} = {alpha * beta:.6g}; "
            f"no smoothing of the nuclear norm does better (Proposition 3.3)"
        )
    return math.sqrt(alpha * dimension / beta) if eta is None else _checks.positive("eta", eta)


def spectrum(name: str, gram: Tensor) -> Tensor:
    """The eigenvalues (…, m) of the Gram matrix (…, m, m) in float64, clipped at 0.

    It is checked up to the rounding of its dtype, so it must come in the one it was summed in.
    """
    held = _checks.decomposable(_checks.symmetric(name, gram))
    eigenvalues = torch.linalg.eigvalsh(held.double())
    # A sum of many rounded products drifts from semidefinite by far more than one rounding, so the
    # check only refuses what no accumulation could explain. Subnormals round like the smallest
    # normal number, whatever their size.
    info = torch.finfo(gram.dtype)
    size = eigenvalues[..., -1:].abs().clamp_min(gram.shape[-1] * info.smallest_normal)
    if (eigenvalues[..., :1] < -(info.eps**0.5) * size).any():
        raise ValueError(
            f"{name} must be positive semidefinite, its smallest eigenvalue is "
            f"{eigenvalues.min().item():.3g}; pass a sum of G @ G.mT"
        )
    return eigenvalues.clamp(min=0)


def real(name: str, value: Real, batch: Tensor) -> Tensor:
    """`value` ≥ 0 in float64, a scalar or a tensor that broadcasts to the shape of `batch`."""
    if not isinstance(value, Tensor):
        number = _checks.nonnegative(name, value)
        return torch.as_tensor(number, dtype=torch.float64, device=batch.device)
    _checks.broadcastable(name, value.shape, "the batch", batch.shape)
    if (_checks.finite(name, value) < 0).any():
        raise ValueError(f"{name} must be ≥ 0, its smallest entry is {value.min().item():.3g}")
    return value.to(device=batch.device, dtype=torch.float64)


def check_width(rows: int, width: int) -> None:
    """Raise on a width of the perturbed matrix for which Theorem 4.1 has no constants."""
    if _checks.count("width", width) < _checks.count("rows", rows) + 2:
        raise ValueError(
            f"width must be at least rows + 2 = {rows + 2}, got {width}; pad with zero columns"
        )
