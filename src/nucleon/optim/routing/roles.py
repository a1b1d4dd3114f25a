"""Roles of parameters in their modules: a matrix with named axes, or a parameter for AdamW.

A table maps module types to functions that return the roles of their parameters. For a parameter
without a role, routing raises an error with overrides.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from nucleon.optim.routing import fused
from nucleon.optim.routing.places import Place, Role

RoleOf = Callable[[Place], Role | None]
"""Function that returns the role of a parameter, or None for an unknown one."""

_TABLE: list[tuple[type[nn.Module] | str, RoleOf]] = []


class RoleError(ValueError):
    """Error on a parameter with contradictory roles; the message names the remedy."""


def register_module(module: type[nn.Module] | str, role_of: RoleOf) -> None:
    """Register the roles of a module type for `for_model`; later entries precede earlier ones.

    Args:
        module: a type, subclasses included, or the name of a class; "*Name" matches every class
            whose name ends with Name.
        role_of: `Place` → `Role`, or None to try the other entries.
    """
    _TABLE.append((module, role_of))


def role(place: Place) -> Role | None:
    """Return the role of a parameter by its module, shape or name; None if unknown."""
    if place.param.is_complex():
        return Role("adamw", "complex: stepped as pairs of real numbers")
    if place.param.ndim <= 1:
        return Role("adamw", _vector_reason(place))
    part = _part(place)
    if part is None:
        return _role_by_table(place)
    weight, how = part
    if weight is None:
        return Role("adamw", how)
    whole = _role_by_table(replace(place, key=weight))
    return None if whole is None else replace(whole, reason=f"{whole.reason}, {how}")


def _vector_reason(place: Place) -> str:
    if place.kind.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")):
        return "norm"
    if place.param.numel() == 1:
        return "scalar"
    return "bias" if "bias" in place.key else "vector"


_SCALED = {
    "_WeightNorm": ("original1", "weight_norm"),
    "_SpectralNorm": ("original", "spectral_norm"),
}
"""{class of a parametrization: (parameter that is the weight up to a scale, its name)}."""
_LENGTHS = "the lengths of weight_norm"


def _part(place: Place) -> tuple[str | None, str] | None:
    """Return (key of the weight, reason) of a part of a parametrized weight; None for no part.

    The V of W = g·V/‖V‖, W = V/σ₁(V) and W = V∘mask has the key of W, by torch's parametrizations
    or the older hooks. Other parts do not multiply: their key is None.
    """
    *_, holder, name = "", *place.path.split(".")
    module: Any = place.module
    if holder == "parametrizations":
        kinds = [type(step).__name__ for step in module.parametrizations[name]]
        weight, how = _SCALED.get(kinds[0], ("", "")) if len(kinds) == 1 else ("", "")
        if place.key == weight:
            return name, f"under {how}"
        return None, _LENGTHS if how else f"parametrized by {', '.join(kinds)}: does not multiply"
    stem, _, end = place.key.rpartition("_")
    if end in ("v", "g") and {f"{stem}_v", f"{stem}_g"} <= set(module._parameters):
        return (stem, "under weight_norm") if end == "v" else (None, _LENGTHS)
    if end == "orig" and stem:
        pruned = f"{stem}_mask" in module._buffers
        return stem, "under pruning" if pruned else "under spectral_norm"
    return None


_ADDED = re.compile(
    r"(^|_)(emb(ed|eds|edding|eddings)?(_table)?|tokens?|latents(_[12]d)?|positional_encoding)$"
    r"|(^|_)rel_pos_[hw]$|(^|_)bias(es)?(_|$)|^A_log$"
)
"""Names of 2-D and larger parameters that are looked up, added or multiplied entrywise."""


def _role_by_table(place: Place) -> Role | None:
    for entry, role_of in reversed(_TABLE):
        if _is(place.module, entry) and (role := role_of(place)) is not None:
            return role
    if place.param.shape[0] == 1:
        return Role("adamw", "its first axis is 1: added to a batch, not multiplied")
    if sum(side > 1 for side in place.param.shape) <= 1:
        return Role("adamw", "vector")
    if _ADDED.search(place.key):
        return Role("adamw", "an embedding, a bias or the like by its name")
    return None


def _is(module: nn.Module | None, entry: type[nn.Module] | str) -> bool:
    if not isinstance(entry, str):
        return isinstance(module, entry)
    names = (base.__name__ for base in type(module).__mro__)
    end = entry.removeprefix("*")
    return any(name == end or (end != entry and name.endswith(end)) for name in names)


# ---------------------------------------------------------- modules of other libraries, by name


def _embedding(place: Place) -> Role:
    if getattr(place.module, "sparse", False):
        raise RoleError(
            f"{place.name} has sparse gradients, which AdamW does not support; pass sparse=False "
            f"to {place.kind}, or overrides={{{place.name!r}: 'frozen'}} and SparseAdam for it"
        )
    return Role("adamw", "embedding")


def _conv1d_of_gpt2(place: Place) -> Role | None:
    """Return the role of a Linear whose weight is (in, out)."""
    if place.key != "weight" or place.param.ndim != 2 or not fused.is_known(place.module):
        return None
    columns, rows = place.param.shape
    return _linear_map(place, "c {}", rows, columns, "Conv1D, stored transposed")


_ROUTES = "a router, stepped as a matrix; overrides may give it to 'adamw'"
_ONE_ROW = "one row, stepped along its normalized gradient; overrides may give it to 'adamw'"


def _router(place: Place) -> Role | None:
    weight = place.key == "weight" and place.param.ndim == 2 and fused.is_known(place.module)
    return Role("matrix", f"{place.kind}: {_ROUTES}", "r c") if weight else None


def _experts(place: Place) -> Role | None:
    entry = fused.experts(place.module, place.key) if place.param.ndim == 3 else None
    return None if entry is None or "bias" in place.key else Role("matrix", entry[1], entry[0])


def _adapter(place: Place) -> Role | None:
    """Return the role of factors of peft, by the name of their dict of adapters."""
    if place.called.startswith("lora_embedding_"):
        return Role("adamw", "embedding")
    if not re.match(r"lora_[AB]$|hada_w|lokr_w", place.called):
        return None
    return Role("matrix", f"adapter {place.called}", "r" + " c" * (place.param.ndim - 1))


# ---------------------------------------------------------------------------- torch's own modules


def _linear(place: Place) -> Role | None:
    if place.key != "weight" or place.param.ndim != 2:
        return None
    rows, columns = place.param.shape
    routes = hasattr(place.parent, "experts") or type(place.parent).__name__.endswith("Router")
    if place.called in ("router", "gate") and routes:
        return Role("matrix", f"{place.kind}: {_ROUTES}", "r c")
    if rows == 1:
        return Role("matrix", f"{place.kind}: {_ONE_ROW}", "r c")
    kind = "MultiheadAttention: output" if _is(place.parent, nn.MultiheadAttention) else place.kind
    return _linear_map(place, "{} c", rows, columns, kind)


def _bilinear(place: Place) -> Role | None:
    matrices = Role("matrix", "Bilinear: a matrix an output", "b r c")
    return matrices if place.key == "weight" else None


def _conv(place: Place) -> Role | None:
    """Return the role of a weight (out, in, taps), or (in, out, taps) of a transposed one."""
    if place.key != "weight":
        return None
    groups: Any = place.module.groups
    transposed = isinstance(place.module, nn.modules.conv._ConvTransposeNd)
    first, second = ("c", "r") if transposed else ("r", "c")
    sizes = place.param.shape[:2]
    taps = " c" * (place.param.ndim - 2)
    if groups > 1 and sizes == (groups, 1):
        return Role("adamw", f"depthwise {place.kind}: a vector a channel")
    if groups > 1:
        spec = f"(b={groups} {first}) {second}{taps}"
        return Role("matrix", f"{place.kind} in {groups} groups", spec)
    spec, rows = f"{first} {second}{taps}", sizes[1 if transposed else 0]
    if rows == 1:
        return Role("matrix", f"{place.kind}: {_ONE_ROW}", spec)
    if transposed:
        return Role("matrix", place.kind, spec)
    return _linear_map(place, f"{{}} c{taps}", sizes[0], sizes[1], place.kind)


def _attention(place: Place) -> Role | None:
    if place.key == "in_proj_weight":
        return Role("matrix", "MultiheadAttention: q, k, v", "(b=3 r) c")
    if place.key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return Role("matrix", f"MultiheadAttention: {place.key[0]}", "r c")
    return Role("adamw", "bias") if place.key in ("bias_k", "bias_v") else None


def _recurrent(gates: int, place: Place) -> Role:
    if place.key.startswith("weight_hr"):
        return Role("matrix", f"{place.kind}: projection", "r c")
    word = f"(b={gates} r)" if gates > 1 else "r"
    return Role("matrix", f"{place.kind}: {gates} gates", f"{word} c")


def _linear_map(place: Place, axes: str, rows: int, columns: int, kind: str) -> Role:
    """Return the role of a matrix whose output axis, `{}` in `axes`, may hold several maps."""
    parent, name = place.as_map
    if (entry := fused.known(parent, name, rows, columns)) is not None:
        word, maps = entry
        return Role("matrix", f"{kind}: {maps}", axes.format(word))
    words = fused.unknown(parent, name, rows, columns)
    if words is None:
        return Role("matrix", kind, axes.format("r"))
    layouts = {meaning: axes.format(word) for meaning, word in words.items()}
    reason = f"{kind}, several maps by its name in an unknown layout: one matrix"
    return Role("matrix", reason, axes.format("r"), layouts)


for _role_of, *_types in (
    (_embedding, "*Embedding", "*Embeddings", nn.Embedding, nn.EmbeddingBag),
    (_conv1d_of_gpt2, "Conv1D"),
    (_router, "*Router"),
    (_experts, "*Experts"),
    (_adapter, nn.ParameterDict),
    (
        lambda place: Role("adamw", "norm"),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase),
    ),
    (_linear, nn.Linear),
    (_bilinear, nn.Bilinear),
    (_conv, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    (_conv, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    (_attention, nn.MultiheadAttention),
    (partial(_recurrent, 1), nn.RNN, nn.RNNCell),
    (partial(_recurrent, 3), nn.GRU, nn.GRUCell),
    (partial(_recurrent, 4), nn.LSTM, nn.LSTMCell),
):
    for _type in _types:
        register_module(_type, _role_of)
