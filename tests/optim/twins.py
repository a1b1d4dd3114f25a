"""Slow NumPy float64 twins of Algorithms 1–3, written from the paper and from nothing of ours."""

import numpy as np


def polar(a):
    u, _, vt = np.linalg.svd(a, full_matrices=False)
    return u @ vt


def inverse_root(a):
    values, vectors = np.linalg.eigh(a)
    return (vectors / np.sqrt(values)) @ vectors.T


class Twin:
    """One matrix, as it stands in the paper: no stacking, no transposition, no tricks."""

    def __init__(self, weight, lr, beta1, beta2=None, *, nesterov=False, decay=0.0):
        self.w = weight.numpy().copy()
        self.lr, self.beta1, self.nesterov = lr, beta1, nesterov
        self.beta2 = beta1**2 if beta2 is None else beta2
        self.decay = decay
        self.total = np.zeros_like(self.w)
        self.tall = self.w.shape[0] > self.w.shape[1]
        short = min(self.w.shape)
        self.gram = np.zeros((short, short))

    def step(self, gradient, scale=1.0):
        g = gradient
        self.total = self.beta1 * self.total + g
        self.gram = self.beta2 * self.gram + (g.T @ g if self.tall else g @ g.T)
        s = self.beta1 * self.total + g if self.nesterov else self.total
        p = self.direction(s.T).T if self.tall else self.direction(s)
        self.w = self.w - self.lr * scale * p - self.lr * self.decay * self.w
        return p


class MuonTwin(Twin):
    def direction(self, s):
        return polar(s)


class LeonTwin(Twin):
    def __init__(self, *args, smoothing_scale=1.0, gradient_bound=0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.c, self.bound = smoothing_scale, gradient_bound

    def smoothing(self):
        return self.c * (self.bound**2 / self.beta1**2 * np.eye(len(self.gram)) + self.gram)

    def direction(self, s):
        return inverse_root(s @ s.T + self.smoothing()) @ s


class PionTwin(LeonTwin):
    """Needs the noise: a list of standard normal matrices (m, n') for each step."""

    def direction(self, s):
        n = s.shape[1]
        factor = np.linalg.cholesky(self.smoothing())
        padded = [np.pad(s, ((0, 0), (0, z.shape[1] - n))) + factor @ z for z in self.noise]
        return np.mean([polar(a)[:, :n] for a in padded], axis=0)
