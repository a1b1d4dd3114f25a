"""The two moments of a gradient sequence and the smoothing built from them: sums, not averages.

Pure functions on stacks (…, m, n), shared by learners and optimizers: no checks, no
synchronization. A scalar argument is a float, a 0-d tensor, or a tensor with one entry per matrix
of the stack; discount 1 is the plain game.
"""

import torch
from torch import Tensor

from nucleon.linalg.kernels import add_product

Scalar = float | Tensor


def accumulate_total(total: Tensor, gradient: Tensor, discount: Scalar) -> Tensor:
    """Return γĜ + G in the dtype of `total`, summed in the wider of the two dtypes."""
    wide = torch.promote_types(total.dtype, gradient.dtype)
    old, new = total.to(wide), gradient.to(wide)
    if isinstance(discount, Tensor):
        return torch.addcmul(new, old, _per_matrix(discount).to(wide)).to(total.dtype)
    return torch.add(new, old, alpha=discount).to(total.dtype)


def accumulate_gram(gram: Tensor, gradient: Tensor, discount: Scalar) -> Tensor:
    """Return γ²M̂ + GGᵀ, with the product formed in the dtype of `gram`."""
    g = gradient.to(gram.dtype)
    if isinstance(discount, Tensor):
        return (_per_matrix(discount) ** 2 * gram + g @ g.mT).to(gram.dtype)
    return add_product(gram, g, g.mT, beta=discount**2)


def smoothing(
    gram: Tensor, *, gradient_bound: Scalar, eta: Scalar = 1.0, discount: Scalar = 1.0
) -> Tensor:
    """Return Λ = (G²γ⁻²I + M̂)/η² of Theorem 3.2 and of its discounted form (Section 5.2).

    Args:
        gram: M̂, (…, m, m).
        gradient_bound: G; with 0 the smoothing is M̂/η² and the theorem does not apply.
        eta: η = √(α/β) of the potential.
        discount: γ.
    """
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    shift = gradient_bound / discount / eta
    if isinstance(shift, Tensor):
        shift = _per_matrix(shift)
    if isinstance(eta, Tensor):
        eta = _per_matrix(eta)
    return (shift * shift * eye + gram / eta**2).to(gram.dtype)  # x * x is inf where x**2 raises


def _per_matrix(scalar: Tensor) -> Tensor:
    """Return one entry per matrix, aligned with the leading dimensions of the stack."""
    return scalar[..., None, None] if scalar.ndim else scalar
