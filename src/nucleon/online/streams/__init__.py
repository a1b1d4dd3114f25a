"""Gradient sequences for the online game.

`stream.gradient(t, action)` is the t-th gradient G_t, t = 1, 2, …, a function of the seed, of t
and, for an adaptive stream, of the learner's action X_t. Nothing is stored from round to round.

The shape is (m, n), or (b, m, n) for b independent games, of which game i is that of the shape
(m, n) with the seed `seed + i`. A tall shape has the transposed gradients of the wide one.

Imports `nucleon.noise` and `online.regret`, no learner.
"""

from nucleon.online.streams.sequences import (
    STREAMS,
    adversary,
    alternating,
    drifting,
    gaussian,
    heavy_tailed,
    ill_conditioned,
    low_rank,
    replay,
    sparse,
)
from nucleon.online.streams.setting import Shape, Stream, StreamOptions
from nucleon.online.streams.worst_case import WorstCase, worst, worst_cases

__all__ = [
    "STREAMS",
    "Shape",
    "Stream",
    "StreamOptions",
    "WorstCase",
    "adversary",
    "alternating",
    "drifting",
    "gaussian",
    "heavy_tailed",
    "ill_conditioned",
    "low_rank",
    "replay",
    "sparse",
    "worst",
    "worst_cases",
]
