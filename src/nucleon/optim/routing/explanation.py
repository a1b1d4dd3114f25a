"""Explanation of a routing: a table for people and logs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from nucleon.linalg.coefficients import custom, largest
from nucleon.optim.engines.cuda import adamw as cuda_adamw
from nucleon.optim.engines.cuda import engine as cuda
from nucleon.optim.engines.work import HasDirection, facts_of
from nucleon.optim.matrices.parameters import blocks
from nucleon.optim.polar_methods import chosen_method
from nucleon.optim.routing.places import Parameter

HEADINGS = ("name", "shape", "axes", "route", "optimizer", "state", "reason")
FROZEN = "frozen, without state until its first gradient"


@dataclass(frozen=True)
class ParameterRow:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    axes: str | None
    """The axes of a matrix, see `nucleon.optim.matrices.axes`; None on other routes."""
    route: str
    """"matrix", "adamw" or "frozen"."""
    reason: str
    state_bytes: int
    """Size of its present state."""
    optimizer: str
    """The optimizer, with the `method` that "auto" chooses for its matrices."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """The rows of all parameters; prints as a table."""

    optimizer: str
    rows: Sequence[ParameterRow]

    def __iter__(self) -> Iterator[ParameterRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> ParameterRow:
        """Return the row of a parameter."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is no parameter of {self.optimizer}")

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """The parameters of each route, their entries and the bytes of state."""
        totals: dict[str, dict[str, int]] = {}
        for row in self.rows:
            total = totals.setdefault(row.route, {"parameters": 0, "entries": 0, "state_bytes": 0})
            total["parameters"] += 1
            total["entries"] += math.prod(row.shape)
            total["state_bytes"] += row.state_bytes
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, for JSON."""
        rows = [{**asdict(row), "shape": list(row.shape)} for row in self.rows]
        return {"optimizer": self.optimizer, "parameters": rows, "totals": self.totals}

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [HEADINGS]
        for row in self.rows:
            shape, state = "×".join(map(str, row.shape)) or "scalar", _size(row.state_bytes)
            cells = (row.name, shape, row.axes or "", row.route, row.optimizer, state, row.reason)
            table.append(cells)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        ]
        lines.insert(1, "─" * max(map(len, lines)))
        sums = [
            f"{route}: {counted(t['parameters'], 'parameter')}, "
            f"{counted(t['entries'], 'entry', 'entries')}, {_size(t['state_bytes'])} of state"
            for route, t in self.totals.items()
        ]
        return "\n".join([*lines, "", *sums])

    __repr__ = __str__  # in a notebook too


def rows(optimizer: HasDirection) -> list[ParameterRow]:
    """Return a row for each parameter of an optimizer."""
    rows: list[ParameterRow] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            info, state = optimizer.infos[param], optimizer.state.get(param, {}).values()
            spec = info.axes if group["route"] == "matrix" else None
            rows.append(
                ParameterRow(
                    name=info.name,
                    shape=tuple(param.shape),
                    axes=spec,
                    route=group["route"],
                    reason=info.reason if param.requires_grad else f"{info.reason}; {FROZEN}",
                    state_bytes=sum(t.numel() * t.element_size() for t in state),
                    optimizer=_stepped_by(optimizer, group, param, spec),
                )
            )
    return rows


def left_out(parameters: Sequence[Parameter]) -> tuple[ParameterRow, ...]:
    """Return a row for each parameter of a model that is not optimized."""
    return tuple(
        ParameterRow(p.name, tuple(p.param.shape), None, "frozen", p.role.reason, 0, "")
        for p in parameters
        if p.role.route == "frozen"
    )


def _stepped_by(
    optimizer: HasDirection, group: Mapping[str, Any], param: Tensor, spec: str | None
) -> str:
    """Return the name of an optimizer, with the choice of "auto" for the matrices of a parameter.

    A user's `direction` has the name alone, since it may ignore `method`. On CUDA the text includes
    the reason if torch's slower path steps them.
    """
    if spec is None:
        refusal = cuda_adamw.refusal(param) if param.is_cuda else None
        return f"adamw (torch: {refusal})" if refusal else "adamw"
    texts: list[str] = []
    for block in blocks(param, spec):
        text = optimizer.name
        if facts_of(optimizer).kernel is not None:
            chosen = chosen_method(group, block.rows, block.columns, param.device, param.dtype)
            text += f"/{chosen}"
            if chosen == "coefficients":
                most = largest(custom(group["coefficients"], group["iterations"]))
                text += f" (‖P‖_op ≤ {math.ceil(1000 * most - 1e-6) / 1000:g})"
        refusal = cuda.refusal(optimizer, group, param, block) if param.is_cuda else None
        texts.append(f"{text} (torch: {refusal})" if refusal else text)
    return ", ".join(dict.fromkeys(texts))


def counted(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 parameter", "2 parameters"."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
