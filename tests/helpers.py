"""The learners, streams and shapes whose cross products the tests play, and their oracles."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nucleon.online import streams
from nucleon.online.learners import FAML, FTL, FTPL, FTRL, GBPA, Learner
from nucleon.online.regret import Ledger
from nucleon.online.streams import Stream

Array = NDArray[np.float64]
Shape = tuple[int, ...]

# A row, a column, a single number, square, wide, tall, and two games at once.
SHAPES: tuple[Shape, ...] = ((1, 1), (1, 5), (5, 1), (3, 3), (3, 7), (7, 3), (2, 3, 5))

LEARNERS: dict[str, Callable[..., GBPA]] = {
    "ftl": FTL,
    "ftrl": FTRL,
    "ftpl": lambda shape, **options: FTPL(shape, **{"samples": 4, **options}),
    "faml": FAML,
}


def _recorded(shape: Shape, **options: Any) -> Stream:
    source = streams.gaussian(shape, dtype=torch.float64, seed=11)
    recording = torch.stack([source.gradient(t) + 0.02 for t in range(1, 61)])
    return streams.replay(recording, **{"bound": 1.0, **options})


STREAMS: dict[str, Callable[..., Stream]] = {
    "alternating": streams.alternating,
    "gaussian": streams.gaussian,
    "low-rank": streams.low_rank,
    "ill-conditioned": streams.ill_conditioned,
    "drifting": lambda shape, **options: streams.drifting(shape, period=20, **options),
    "sparse": streams.sparse,
    "heavy-tailed": streams.heavy_tailed,
    "greedy": streams.adversary,
    "orthogonal": lambda shape, **options: streams.adversary(shape, kind="orthogonal", **options),
    "replay": _recorded,
}
OBLIVIOUS = tuple(name for name in STREAMS if name not in ("greedy", "orthogonal"))


def rounds_of(learner: Learner, stream: Stream, rounds: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(G_t, X_t) of a game, the learner observing each gradient as it is yielded."""
    for t in range(learner.rounds + 1, learner.rounds + rounds + 1):
        action = learner.play()
        gradient = stream.gradient(t, action)
        learner.observe(gradient, oblivious=stream.oblivious)
        yield gradient, action


def ledger_of(learner: Learner, stream: Stream, rounds: int) -> Ledger:
    """The learner's ledger after so many more rounds."""
    for _ in rounds_of(learner, stream, rounds):
        pass
    return learner.ledger


def actions_of(learner: Learner, gradients: Iterable[Tensor]) -> Tensor:
    """X_1 … X_{T+1} against gradients fixed beforehand."""
    actions = [learner.play()]
    for gradient in gradients:
        learner.observe(gradient.contiguous(), oblivious=True)
        actions.append(learner.play())
    return torch.stack(actions)


def root(smoothing: Array) -> Array:
    """Λ^(1/2) by NumPy's eigendecomposition."""
    values, vectors = np.linalg.eigh(smoothing)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def polar(x: Array) -> Array:
    """The polar factor by NumPy's SVD."""
    u, _, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt


def nuclear(x: Array) -> Array:
    """‖x‖_* by NumPy's SVD."""
    return np.linalg.svd(x, compute_uv=False).sum(-1)


def operator(x: Tensor) -> float:
    """The largest operator norm of a batch, by NumPy's SVD in float64."""
    return float(np.linalg.svd(x.double().numpy(), compute_uv=False).max())
