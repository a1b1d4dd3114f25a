"""The online game: a learner against a stream of gradients, its regret beside its bound."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from nucleon import _checks
from nucleon._files import to_json, write_whole
from nucleon.certificate import Certificate
from nucleon.online.learners import Learner
from nucleon.online.regret import Shape
from nucleon.online.streams import Stream

FORMAT, VERSION = "nucleon-trace", 1
_SERIES = ("regret", "bound", "norm")
_MEASURED = ("regret", "bound", "largest", "excess", "gradient_bound", "lower")
_CERTIFICATE = fields(Certificate)
_PER_DECADE = 20


class RecordedRound(NamedTuple):
    """A recorded round, as it happens."""

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
    """With which probability the bound may fail, where the learner draws noise; None: its mean."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, tensors as lists."""
        certificate = {f.name: _plain(getattr(self.certificate, f.name)) for f in _CERTIFICATE}
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {**values, "certificate": certificate}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the trace of a dict by `to_dict`, also after JSON, where "inf" is a word."""
        typed, end = dict(values), dict(values["certificate"])
        typed |= {name: tuple(values[name]) for name in ("shape", "rounds")}
        typed |= {name: _tensor(values[name]) for name in _SERIES}
        end |= {name: _tensor(end[name]) for name in _MEASURED if end[name] is not None}
        typed["certificate"] = Certificate(**end)
        return cls(**typed)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all."""
        header = {"format": FORMAT, "version": VERSION}
        write_whole(Path(path), to_json({**header, **self.to_dict()}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of `save`; raise on any other."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            kind = values.pop("format"), values.pop("version")
            if kind != (FORMAT, VERSION):
                raise ValueError(f"it is of format {kind}, not {(FORMAT, VERSION)}")
            return cls.from_dict(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a whole trace: {error}; play the game again"
            ) from error


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
        on_record: called with each recorded `RecordedRound` as it happens, to watch the game live.
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
    measured = {name: getattr(end, name) for name in _MEASURED}
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
        certificate=replace(end, **{n: x.cpu() for n, x in measured.items() if x is not None}),
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
    return list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _tensor(values: Any) -> Tensor:
    """Return nested lists of numbers, or of words such as "inf", as float64."""

    def numbers(value: Any) -> Any:
        return [numbers(v) for v in value] if isinstance(value, list) else float(value)  # pyright: ignore[reportUnknownVariableType]

    return torch.tensor(numbers(values), dtype=torch.float64)
