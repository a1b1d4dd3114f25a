"""The rounds of Appendix F, computed and counted: a product of a×b and b×c takes 2abc flops."""

import math

import numpy as np

from nucleon.claims.oracle.algebra import Array, transposed


class Counted:
    """Matrix products, and the flops they took."""

    def __init__(self) -> None:
        self.flops = 0.0

    def product(self, a: Array, b: Array) -> Array:
        """AB of each pair of matrices of two stacks."""
        product = a @ b
        self.flops += 2.0 * product.size * a.shape[-1]
        return product

    def cholesky(self, a: Array) -> Array:
        """L with LLᵀ = A, which takes m³/3."""
        self.flops += a.shape[-1] ** 3 / 3
        return np.linalg.cholesky(a)


def augmented(s: Array, g: Array, gram: Array, steps: int) -> tuple[Array, float]:
    """K steps of T = (3I − B)/2, X ← TX, B ← TBT from SSᵀ + Λ, Λ = M + GGᵀ; with its flops."""
    count, eye = Counted(), np.eye(len(s))
    smoothing = gram + count.product(g, g.T)
    square = (s**2).sum() + np.trace(smoothing)
    x, b = s / math.sqrt(square), (count.product(s, s.T) + smoothing) / square
    for _ in range(steps):
        t = 1.5 * eye - 0.5 * b
        x, b = count.product(t, x), count.product(count.product(t, b), t)
    return x, count.flops


def coupled(s: Array, g: Array, gram: Array, steps: int) -> tuple[Array, float]:
    """A^{-1/2}S, A = SSᵀ + M + GGᵀ, by K coupled steps: T = ZY, Y ← Y(3I−T)/2, Z ← (3I−T)Z/2."""
    count, eye = Counted(), np.eye(len(s))
    a = count.product(s, s.T) + gram + count.product(g, g.T)
    norm = np.linalg.norm(a)
    y, z = a / math.sqrt(norm), eye / math.sqrt(norm)
    for _ in range(steps):
        t = 1.5 * eye - 0.5 * count.product(z, y)
        y, z = count.product(y, t), count.product(t, z)
    return count.product(z, s), count.flops


def ftpl(s: Array, g: Array, gram: Array, z: Array, steps: int) -> tuple[Array, float]:
    """The mean over Z of K Newton–Schulz steps X ← (3I − XXᵀ)X/2 from S + LZ, LLᵀ = M + GGᵀ."""
    count = Counted()
    root = count.cholesky(gram + count.product(g, g.T))
    x = s + count.product(np.broadcast_to(root, (len(z), *root.shape)), z)
    x = x / np.linalg.norm(x, axis=(-2, -1), keepdims=True)
    for _ in range(steps):
        x = 1.5 * x - 0.5 * count.product(count.product(x, transposed(x)), x)
    return x.mean(0), count.flops
