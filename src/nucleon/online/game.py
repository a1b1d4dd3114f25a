"""The online game: a learner against a stream of gradients, its regret beside its bound."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from nucleon import _checks
from nucleon._files import digest, to_json, write_whole
from nucleon.certificate import Certificate
from nucleon.online.learners import Learner
from nucleon.online.regret import Shape
from nucleon.online.streams import Stream

FORMAT, VERSION = "nucleon-trace", 1
_SERIES = ("regret", "bound", "norm")
_OPTIONAL = ("largest", "excess", "gradient_bound", "lower")
_MEASURED = ("regret", "bound", *_OPTIONAL)
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
        """Return all fields as plain values for JSON; an infinite bound is None, NaN "nan"."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        series = {name: _plain(plain[name].tolist()) for name in _SERIES}
        lists = {name: list(plain[name]) for name in ("shape", "rounds")}
        end = {f.name: getattr(self.certificate, f.name) for f in fields(self.certificate)}
        end = {n: _plain(x.tolist()) if isinstance(x, Tensor) else x for n, x in end.items()}
        return {**plain, **lists, **series, "certificate": end}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the trace of a dict by `to_dict`."""
        typed = dict(values)
        for name in ("shape", "rounds"):
            typed[name] = tuple(values[name])
        for name in _SERIES:
            typed[name] = _tensor(values[name])
        end = dict(values["certificate"])
        for name in _MEASURED:
            end[name] = None if end[name] is None and name in _OPTIONAL else _tensor(end[name])
        typed["certificate"] = Certificate(**end)
        return cls(**typed)

    def save(self, path: str | Path) -> None:
        """Write JSON lines: a header, one per recorded round, a last one with their SHA-256.

        The file appears whole or not at all: it is written under a temporary name and renamed.
        """
        path, values = Path(path), self.to_dict()
        columns = {name: values.pop(name) for name in ("rounds", *_SERIES)}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        header = {"format": FORMAT, "version": VERSION, **values}
        lines = [to_json(line) for line in [header, *rows]]
        lines.append(to_json({"rows": len(rows), "sha256": _digest(lines)}))
        write_whole(path, "\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of `save`; raise on a truncated, altered or other file."""
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            header, *rows, last = (json.loads(line) for line in lines)
            kind = header.pop("format"), header.pop("version")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a whole trace: {error}; play the game again"
            ) from error
        if kind != (FORMAT, VERSION):
            raise ValueError(f"{path} must be of format {(FORMAT, VERSION)}, got {kind}")
        if last != {"rows": len(rows), "sha256": _digest(lines[:-1])}:
            raise ValueError(f"{path} is cut off or was altered: its checksum does not agree")
        columns = {name: [row[name] for row in rows] for name in ("rounds", *_SERIES)}
        return cls.from_dict({**header, **columns})


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
    _check_pair(learner, stream, rounds)
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
        certificate=_on_cpu(learner.certificate(delta=delta)),
        delta=delta,
    )


def _row(learner: Learner, action: Tensor, delta: float | None) -> RecordedRound:
    certificate, norm = learner.certificate(delta=delta), learner.ledger.norm(action)
    return RecordedRound(learner.rounds, certificate.regret, certificate.bound, norm)


def _check_pair(learner: Learner, stream: Stream, rounds: int) -> None:
    """Check that learner and stream match, and that the stream has enough rounds."""
    if tuple(stream.shape) != learner.shape:
        raise ValueError(
            f"the stream has shape {tuple(stream.shape)} but the learner {learner.shape}; "
            f"build both alike"
        )
    if stream.rounds is not None and learner.rounds + rounds > stream.rounds:
        raise ValueError(
            f"rounds must not go past the end of the stream, which has {stream.rounds}, got "
            f"rounds={rounds} from round {learner.rounds + 1} on"
        )


def _on_cpu(certificate: Certificate) -> Certificate:
    values = {name: getattr(certificate, name) for name in _MEASURED}
    return replace(certificate, **{n: x if x is None else x.cpu() for n, x in values.items()})


def _is_due(t: int, record: Literal["log"] | int) -> bool:
    """Return whether round t is recorded: every so many, or where ⌊20·log₁₀ t⌋ steps up."""
    if record != "log":
        return t % record == 0
    return t == 1 or _decade(t) > _decade(t - 1)


def _decade(t: int) -> int:
    return math.floor(_PER_DECADE * math.log10(t) + 1e-9)


def _plain(values: Any) -> Any:
    """Return nested lists for JSON: None for infinity, "nan" or "-inf" as text."""
    if isinstance(values, list):
        return [_plain(value) for value in values]  # pyright: ignore[reportUnknownVariableType]
    if values == math.inf:
        return None
    return values if math.isfinite(values) else str(values)


def _tensor(values: Any) -> Tensor:
    def numbers(value: Any) -> Any:
        if isinstance(value, list):
            return [numbers(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
        return math.inf if value is None else float(value)

    return torch.tensor(numbers(values), dtype=torch.float64)


def _digest(lines: list[str]) -> str:
    return digest("\n".join(lines).encode())
