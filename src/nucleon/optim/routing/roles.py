"""What each parameter is to its module: a matrix with named axes, or something for AdamW.

A table from module types to functions that know their parameters. What the table does not know
is not guessed: it has no role, and routing asks for one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from nucleon.optim.routing import cuts, fused, parametrized

Route = Literal["matrix", "adamw"]


class RoleError(ValueError):
    """A parameter whose role cannot be told; the message says how to tell it."""


@dataclass(frozen=True)
class Role:
    """What a parameter is."""

    route: Route
    reason: str
    axes: str | None = None
    unknown_order: bool = False
    """Whether it is one matrix only for want of knowing how several maps lie in it."""


@dataclass(frozen=True)
class Place:
    """A parameter where it stands: `module` holds it as `key`, `parent` holds the module.

    Of a parametrized weight these are the module that uses the weight, and its parent.
    """

    module: nn.Module
    parent: nn.Module | None
    path: str
    """Of what holds the parameter, from the root."""
    key: str
    param: Tensor
    grandparent: nn.Module | None = None

    @property
    def name(self) -> str:
        """Of the parameter, from the root."""
        return f"{self.path}.{self.key}" if self.path else self.key

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    @property
    def called(self) -> str:
        """How the parent calls the module."""
        return owner(self.path).rpartition(".")[2]

    @property
    def as_map(self) -> tuple[nn.Module | None, str]:
        """Who uses the map that the module is, and as what: `qkv.linear` beside its norm is qkv."""
        outer = owner(self.path).rpartition(".")[0].rpartition(".")[2]
        if self.parent is None or fused.parts(self.called) > 1 or fused.parts(outer) == 1:
            return self.parent, self.called
        alone = sum(p.ndim > 1 for p in self.parent.parameters()) == 1
        return (self.grandparent, outer) if alone else (self.parent, self.called)

    @property
    def cut(self) -> "tuple[nn.Module, cuts.Cut] | None":
        """Who takes apart what the map gives, and how; None if nobody does."""
        outer = owner(self.path).rpartition(".")[0].rpartition(".")[2]
        inner, around = cuts.reading(self.parent).cuts, cuts.reading(self.grandparent).cuts
        if self.parent is not None and self.called in inner:
            return self.parent, inner[self.called]
        handed = self.parent is not None and outer in around and _hands_on(self.parent, self.called)
        found = around.get(outer if handed else f"{outer}.{self.called}")
        return (self.grandparent, found) if self.grandparent is not None and found else None


def _hands_on(parent: nn.Module, name: str) -> bool:
    """Whether what `parent.name` gives is what the parent gives."""
    if isinstance(parent, nn.ModuleList | nn.ModuleDict):
        return True
    maps = [n for n, m in parent.named_children() if fused.is_map(m)]
    last = maps[-1:] == [name] and (isinstance(parent, nn.Sequential) or len(maps) == 1)
    return last or name in cuts.reading(parent).gives


_TAIL = re.compile(
    r"(\.(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod|base_layer))*"
    r"(\.parametrizations\.\w+)?$"
)


def owner(path: str) -> str:
    """The path of a module without what wrappers and parametrizations put at its end."""
    return _TAIL.sub("", f".{path}", count=1)[1:]


RoleOf = Callable[[Place], Role | None]
"""The role of a parameter of a known module; None where it is not one of those it knows."""

_TABLE: list[tuple[type[nn.Module] | str, RoleOf]] = []


def register_module(module: type[nn.Module] | str, role_of: RoleOf) -> None:
    """Teach `for_model` a module type; the latest entry that matches a module is asked first.

    Args:
        module: a type, subclasses included, or the name of a class that need not be imported; a
            name that starts with "*" matches the end of one.
        role_of: `Place` → `Role`, or None to leave the parameter to the other entries.
    """
    _TABLE.append((module, role_of))


def role(place: Place) -> Role | None:
    """The role of a parameter by its module, by its shape or by its name; None if nobody knows."""
    if place.param.is_complex():
        return Role("adamw", "complex: stepped as pairs of real numbers")
    if place.param.ndim <= 1:
        return Role("adamw", _vector_reason(place))
    if (found := parametrized.weight(place.module, place.path, place.key)) is not None:
        return _role_of_weight(place, *found)
    return _role_by_table(place)


def _role_of_weight(place: Place, weight: str | None, how: str) -> Role | None:
    """The role of what a weight is made of: its own, if it is the weight up to a scale."""
    if weight is None:
        return Role("adamw", how)
    found = _role_by_table(replace(place, key=weight))
    return None if found is None else replace(found, reason=f"{found.reason}, {how}")


def _role_by_table(place: Place) -> Role | None:
    for entry, role_of in reversed(_TABLE):
        if _is(place.module, entry) and (found := role_of(place)) is not None:
            return found
    if place.param.shape[0] == 1:
        return Role("adamw", "its first axis is 1: added to a batch, not multiplied")
    if sum(side > 1 for side in place.param.shape) <= 1:
        return Role("adamw", "vector")
    if _ADDED.search(place.key):
        return Role("adamw", "an embedding, a bias or the like by its name")
    return None


def _is(module: nn.Module, entry: type[nn.Module] | str) -> bool:
    if not isinstance(entry, str):
        return isinstance(module, entry)
    names = (base.__name__ for base in type(module).__mro__)
    end = entry.removeprefix("*")
    return any(name == end or (end != entry and name.endswith(end)) for name in names)


_ADDED = re.compile(
    r"(^|_)(emb(ed|eds|edding|eddings)?(_table)?|tokens?|latents(_[12]d)?|positional_encoding)$"
    r"|(^|_)rel_pos_[hw]$|(^|_)bias(es)?(_|$)|^A_log$"
)
"""Names of 2-D and larger parameters that are looked up, added or taken entry by entry."""


def _vector_reason(place: Place) -> str:
    if place.kind.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d")):
        return "norm"
    if place.param.numel() == 1:
        return "scalar"
    return "bias" if "bias" in place.key else "vector"


# ---------------------------------------------------------- modules of other libraries, by name


def _embedding(place: Place) -> Role:
    if getattr(place.module, "sparse", False):
        raise RoleError(
            f"{place.name} has sparse gradients, which AdamW here does not take; pass sparse=False "
            f"to {place.kind}, or overrides={{{place.name!r}: 'frozen'}} and SparseAdam for it"
        )
    return Role("adamw", "embedding")


def _conv1d_of_gpt2(place: Place) -> Role | None:
    """A Linear whose weight is (in, out)."""
    if place.key != "weight" or place.param.ndim != 2:
        return None
    columns, rows = place.param.shape
    return _linear_map(place, "c {}", rows, columns, "Conv1D, stored transposed")


_ROUTES = "a router, stepped as a matrix; overrides may give it to 'adamw'"
_ONE_ROW = "one row, stepped along its normalized gradient; overrides may give it to 'adamw'"


def _router(place: Place) -> Role | None:
    known = place.key == "weight" and place.param.ndim == 2
    return Role("matrix", f"{place.kind}: {_ROUTES}", "r c") if known else None


def _experts(place: Place) -> Role | None:
    """Stacks (experts, out, in), or transposed; gate and up are joined in one, or alternate."""
    if "bias" in place.key:
        return Role("adamw", "bias")
    if place.param.ndim != 3:
        return None
    rows = "r"
    if place.key == "gate_up_proj" and getattr(place.module, "has_gate", True):
        joined = getattr(place.module, "is_concatenated", place.kind != "GptOssExperts")
        rows = "(b=2 r)" if joined else "(r b=2)"
    if place.key == "mlp1_weight_EGD" and place.kind == "GptOssGroupedExperts":  # of torchtitan
        rows = "(r b=2)"
    what = "experts: gate, up" if rows != "r" else "experts"
    if _transposed(place.module):
        return Role("matrix", f"{what}, each (in, out)", f"b c {rows}")
    return Role("matrix", f"{what}, each (out, in)", f"b {rows} c")


def _transposed(experts: nn.Module) -> bool:
    """Whether the stacks are (experts, in, out): as they say, else by the shapes of a pair."""
    both, down = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    if not hasattr(experts, "is_transposed") and both is not None and down is not None:
        return both.shape[1] == down.shape[2] and both.shape[2] == 2 * down.shape[1]
    return getattr(experts, "is_transposed", False)


def _adapter(place: Place) -> Role | None:
    """Factors of peft, by the name of the dict that holds one for each adapter."""
    if place.called.startswith("lora_embedding_"):
        return Role("adamw", "embedding")
    if not re.match(r"lora_[AB]$|hada_w|lokr_w", place.called):
        return None
    return Role("matrix", f"adapter {place.called}", "r" + " c" * (place.param.ndim - 1))


for _name in ("*Embedding", "*Embeddings"):
    register_module(_name, _embedding)
register_module("Conv1D", _conv1d_of_gpt2)
register_module("*Router", _router)
register_module("*Experts", _experts)
register_module(nn.ParameterDict, _adapter)

# ---------------------------------------------------------------------------- torch's own modules


def _norm(place: Place) -> Role:
    return Role("adamw", "norm")


def _linear(place: Place) -> Role | None:
    if place.key != "weight" or place.param.ndim != 2:
        return None
    rows, columns = place.param.shape
    if place.called in ("router", "gate") and _routes(place.parent):
        return Role("matrix", f"{place.kind}: {_ROUTES}", "r c")
    if rows == 1:
        return Role("matrix", f"{place.kind}: {_ONE_ROW}", "r c")
    return _linear_map(place, "{} c", rows, columns, place.kind)


def _routes(parent: nn.Module | None) -> bool:
    """Whether a module sends tokens to experts: it holds them, or is named after what it does."""
    return hasattr(parent, "experts") or type(parent).__name__.endswith("Router")


def _bilinear(place: Place) -> Role | None:
    return (
        Role("matrix", "Bilinear: a matrix an output", "b r c") if place.key == "weight" else None
    )


def _conv(place: Place) -> Role | None:
    """Stored (out, in, taps); a transposed one (in, out, taps)."""
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


for _role_of, *_types in (
    (_embedding, nn.Embedding, nn.EmbeddingBag),
    (_norm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase),
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

# --------------------------------------------------------------- several maps in one weight


def _linear_map(place: Place, axes: str, rows: int, columns: int, kind: str) -> Role:
    """A matrix whose output axis, `{}` in `axes`, may have several maps in it."""
    parent, name = place.as_map
    if (found := fused.known(parent, name, rows, columns)) is not None:
        word, maps = found
        return Role("matrix", f"{kind}: {maps}", axes.format(word))
    given = name in cuts.reading(parent).gives
    if place.cut is not None or fused.seems_fused(parent, name, rows, given=given):
        said = f"{kind}, several maps by its name, size or use in an order not known: one matrix"
        return Role("matrix", said, axes.format("r"), unknown_order=True)
    return Role("matrix", kind, axes.format("r"))
