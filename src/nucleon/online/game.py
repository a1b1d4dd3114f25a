"""The online game: a learner against a stream of gradients, its regret beside its bound."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nucleon import _checks
from nucleon.certificate import Certificate
from nucleon.online.learners import Learner
from nucleon.online.regret import Shape
from nucleon.online.streams import Stream

_PER_DECADE = 20


class RecordedRound(NamedTuple):
    """A recorded round."""

    round: int
    """t."""
    regret: Tensor
    """Reg_t, () or (b,), float64."""
    bound: Tensor
    """The theorem's bound, infinite without one."""
    norm: Tensor
    """‖X_t‖ in the norm of the game's ball: ‖·‖_op, on the ℓ∞ ball ‖·‖_∞."""

    @property
    def slack(self) -> Tensor:
        """Bound − regret."""
        return self.bound - self.regret


@dataclass(frozen=True, eq=False)
class Trace:
    """A game and its records; series have one row per recorded round."""

    learner: str
    """The learner's name."""
    options: dict[str, Any]
    """Its options, as plain values."""
    stream: str
    """The stream's name."""
    oblivious: bool
    """True if all gradients were fixed before the game, also those of an earlier part of it."""
    shape: Shape
    """(m, n), or (b, m, n) for b games."""
    dtype: str
    """Dtype of gradients and actions."""
    radius: float
    """D."""
    discount: float
    """γ."""
    rounds: tuple[int, ...]
    """The rounds recorded, (R,), the last one included."""
    regret: Tensor
    """Reg_t after these rounds, (R,) or (R, b), float64."""
    bound: Tensor
    """The theorem's bound after them, infinite without one."""
    norm: Tensor
    """‖X_t‖ in them, in the norm of the game's ball: ‖·‖_op, on the ℓ∞ ball ‖·‖_∞."""
    certificate: Certificate
    """The regret after the last round beside its bound."""
    delta: float | None = None
    """Probability with which the bound may fail; None for a bound on the mean over the noise."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, tensors as lists."""
        return {name: _plain(value) for name, value in vars(self).items()}


def play(
    learner: Learner,
    stream: Stream,
    rounds: int,
    *,
    record: Literal["log"] | int = "log",
    on_record: Callable[[RecordedRound], object] | None = None,
    delta: float | None = None,
) -> Trace:
    """Play `rounds` rounds: X_t from the learner, G_t from the stream.

    An oblivious stream does not receive the actions.

    Args:
        learner: a learner of the stream's shape, dtype and device. A learner that has played before
            continues with the stream's next round.
        stream: a stream of gradients.
        rounds: number of rounds, ≥ 1.
        record: the rounds whose regret, bound and action norm are kept: "log", about 20 per
            decade (default), or every so many; the last one always.
        on_record: called with each `RecordedRound` as it happens, to watch the game live.
        delta: δ, the probability with which the bound of a learner with noise may fail at the last
            round; None bounds the mean over the noise (default).
    """
    _checks.count("rounds", rounds)
    if record != "log":
        _checks.count("record", record)
    if tuple(stream.shape) != learner.shape:
        raise ValueError(
            f"the stream has shape {tuple(stream.shape)} but the learner {learner.shape}; build "
            f"both alike"
        )
    if stream.rounds is not None and learner.rounds + rounds > stream.rounds:
        raise ValueError(
            f"rounds must not go past the end of the stream, which has {stream.rounds}, got "
            f"rounds={rounds} from round {learner.rounds + 1} on"
        )
    learner.certificate(delta=delta)  # raises on a bad δ before the first round
    first, last = learner.rounds + 1, learner.rounds + rounds
    rows: list[RecordedRound] = []
    for t in range(first, last + 1):
        action = learner.play()
        gradient = stream.gradient(t, None if stream.oblivious else action)
        learner.observe(gradient, oblivious=stream.oblivious)
        if t == last or _is_due(t, record):
            rows.append(_row(learner, action, delta))
            if on_record is not None:
                on_record(rows[-1])
    end = learner.certificate(delta=delta)
    measured = {name: x.cpu() for name, x in vars(end).items() if isinstance(x, Tensor)}
    recorded, *series = zip(*rows, strict=True)
    regret, bound, norm = (torch.stack(column).cpu() for column in series)
    return Trace(
        learner=learner.name,
        options=learner.options(),
        stream=stream.name,
        oblivious=learner.ledger.oblivious,
        shape=learner.shape,
        dtype=str(learner.dtype),
        radius=learner.radius,
        discount=learner.discount,
        rounds=recorded,
        regret=regret,
        bound=bound,
        norm=norm,
        certificate=replace(end, **measured),
        delta=delta,
    )


def _row(learner: Learner, action: Tensor, delta: float | None) -> RecordedRound:
    certificate, norm = learner.certificate(delta=delta), learner.ledger.norm(action)
    return RecordedRound(learner.rounds, certificate.regret, certificate.bound, norm)


def _is_due(t: int, record: Literal["log"] | int) -> bool:
    """Return True if round t is recorded: every so many, or where ⌊20·log₁₀ t⌋ steps up."""
    if record != "log":
        return t % record == 0
    decades = (math.floor(_PER_DECADE * math.log10(s) + 1e-9) for s in (t, max(t - 1, 1)))
    return t == 1 or next(decades) > next(decades)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Certificate):
        return {name: _plain(entry) for name, entry in vars(value).items()}
    return list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
