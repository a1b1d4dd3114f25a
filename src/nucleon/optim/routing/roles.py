"""What each parameter is to its module: a matrix with named axes, or something for AdamW.

A table from module types to functions that know their parameters. What the table does not know
is not guessed: it has no role, and routing asks for one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

Route = Literal["matrix", "adamw"]


class RoleError(ValueError):
    """A parameter whose role cannot be told; the message says how to tell it."""


@dataclass(frozen=True)
class Role:
    """What a parameter is."""

    route: Route
    reason: str
    axes: str | None = None


@dataclass(frozen=True)
class Place:
    """A parameter where it stands: `module` holds it as `key`, `parent` holds the module."""

    module: nn.Module
    parent: nn.Module | None
    path: str
    """Of the module, from the root."""
    key: str
    param: Tensor

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
        return self.path.rpartition(".")[2]


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
    if place.param.ndim <= 1:
        return Role("adamw", _vector_reason(place))
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
    r"(^|_)(emb(ed|eds|edding|eddings)?|tokens?|latents|rel_pos_[hw])$|(^|_)bias(es)?(_|$)|^A_log$"
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
    word, what = _rows(place, rows, columns)
    return Role("matrix", f"Conv1D, stored transposed{what}", f"c {word}")


def _router(place: Place) -> Role | None:
    known = place.key == "weight" and place.param.ndim == 2
    return Role("matrix", f"{place.kind}: hidden → experts", "r c") if known else None


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
    what = "experts: gate, up" if rows != "r" else "experts"
    return Role("matrix", what, f"b c {rows}" if _transposed(place.module) else f"b {rows} c")


def _transposed(experts: nn.Module) -> bool:
    """Whether the stacks are (experts, in, out): as they say, else by the shapes of a pair."""
    both, down = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    if not hasattr(experts, "is_transposed") and both is not None and down is not None:
        return both.shape[1] == down.shape[2] and both.shape[2] == 2 * down.shape[1]
    return getattr(experts, "is_transposed", False)


def _lora_embedding(place: Place) -> Role | None:
    return Role("adamw", "embedding") if "lora_embedding_" in place.path else None


for _name in ("*Embedding", "*Embeddings"):
    register_module(_name, _embedding)
register_module("Conv1D", _conv1d_of_gpt2)
register_module("*Router", _router)
register_module("*Experts", _experts)
register_module(nn.ParameterDict, _lora_embedding)

# ---------------------------------------------------------------------------- torch's own modules


def _norm(place: Place) -> Role:
    return Role("adamw", "norm")


def _linear(place: Place) -> Role | None:
    if place.key != "weight" or place.param.ndim != 2:
        return None
    word, what = _rows(place, *place.param.shape)
    return Role("matrix", f"{place.kind}{what}", f"{word} c")


def _bilinear(place: Place) -> Role | None:
    return (
        Role("matrix", "Bilinear: a matrix an output", "b r c") if place.key == "weight" else None
    )


def _conv(place: Place) -> Role | None:
    groups: Any = place.module.groups
    if place.key != "weight":
        return None
    taps = " c" * (place.param.ndim - 2)
    if groups == 1:
        word, what = _rows(place, *place.param.shape[:2])
        return Role("matrix", f"{place.kind}{what}", f"{word} c{taps}")
    if place.param.shape[0] == groups and place.param.shape[1] == 1:
        return Role("adamw", f"depthwise {place.kind}: a vector a channel")
    return Role("matrix", f"{place.kind} in {groups} groups", f"(b={groups} r) c{taps}")


def _conv_transpose(place: Place) -> Role | None:
    groups: Any = place.module.groups
    if place.key != "weight":
        return None
    taps = " c" * (place.param.ndim - 2)
    if groups == 1:
        return Role("matrix", place.kind, f"c r{taps}")
    if place.param.shape[0] == groups and place.param.shape[1] == 1:
        return Role("adamw", f"depthwise {place.kind}: a vector a channel")
    return Role("matrix", f"{place.kind} in {groups} groups", f"(b={groups} c) r{taps}")


def _attention(place: Place) -> Role | None:
    if place.key == "in_proj_weight":
        return Role("matrix", "MultiheadAttention: q, k, v", "(b=3 r) c")
    if place.key in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        return Role("matrix", f"MultiheadAttention: {place.key[0]}", "r c")
    return Role("adamw", "bias") if place.key in ("bias_k", "bias_v") else None


def _recurrent(gates: int) -> RoleOf:
    def role_of(place: Place) -> Role | None:
        if place.key.startswith("weight_hr"):
            return Role("matrix", f"{place.kind}: projection", "r c")
        word = f"(b={gates} r)" if gates > 1 else "r"
        return Role("matrix", f"{place.kind}: {gates} gates", f"{word} c")

    return role_of


for _type in (nn.Embedding, nn.EmbeddingBag):
    register_module(_type, _embedding)
for _type in (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase):
    register_module(_type, _norm)
register_module(nn.Linear, _linear)
register_module(nn.Bilinear, _bilinear)
for _type in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_module(_type, _conv)
for _type in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_module(_type, _conv_transpose)
register_module(nn.MultiheadAttention, _attention)
for _type, _gates in ((nn.RNN, 1), (nn.RNNCell, 1), (nn.GRU, 3), (nn.GRUCell, 3)):
    register_module(_type, _recurrent(_gates))
for _type in (nn.LSTM, nn.LSTMCell):
    register_module(_type, _recurrent(4))

# --------------------------------------------------------------- several maps in one weight

_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_QKV = ("qkv", "qkv_proj", "Wqkv", "wqkv", "to_qkv", "W_pack", "c_attn", "query_key_value")
_PAIRS = {"kv": "k, v", "to_kv": "k, v", "gate_up_proj": "gate, up"}


def _rows(place: Place, rows: int, columns: int) -> tuple[str, str]:
    """The word of the output axis, and what to say of it: several maps may be stacked in it."""
    if place.called in _PAIRS and rows % 2 == 0:
        return "(b=2 r)", f": {_PAIRS[place.called]}"
    if place.called not in _QKV:
        return "r", ""
    kind = type(place.parent).__name__
    if place.called == "c_attn" and rows == 2 * columns:
        return "(b=2 r)", ": k, v"
    if kind in _OTHER_ORDERS:
        return _OTHER_ORDERS[kind](place, rows)
    if place.called != "query_key_value":  # whose authors differ in the order
        heads, kv_heads = _number(place, _HEADS), _number(place, _KV_HEADS)
        if kv_heads is None or kv_heads == heads:
            if rows % 3 == 0:
                return "(b=3 r)", ": q, k, v"
        elif heads and rows % (heads + 2 * kv_heads) == 0:
            return _sections(rows, heads, kv_heads)
    raise RoleError(
        f"{place.name} of shape {tuple(place.param.shape)} looks like queries, keys and values in "
        f"one weight, in an order that {kind} does not tell; pass overrides={{{place.name!r}: "
        f"{{'axes': …}}}} with '(b=3 r) c' for q, k, v one after the other, '(r=HEADS b=3 r) c' "
        f"head by head, or 'r c' for one matrix"
    )


def _number(place: Place, names: tuple[str, ...]) -> int | None:
    for holder in (place.parent, getattr(place.parent, "config", None)):
        for name in names:
            if isinstance(value := getattr(holder, name, None), int):
                return value
    return None


def _sections(rows: int, heads: int, kv_heads: int) -> tuple[str, str]:
    size = rows // (heads + 2 * kv_heads)
    sizes = (heads * size, kv_heads * size, kv_heads * size)
    return f"r{{{','.join(map(str, sizes))}}}", ": q, k, v, grouped queries"


def _per_head(place: Place, rows: int) -> tuple[str, str]:
    return f"(r={_number(place, _HEADS)} b=3 r)", ": q, k, v, head by head"


def _falcon(place: Place, rows: int) -> tuple[str, str]:
    if getattr(place.parent, "new_decoder_architecture", False):
        return "r", ": q, k, v in groups of heads, which no axes part; one matrix"
    return _big_code(place, rows)


def _big_code(place: Place, rows: int) -> tuple[str, str]:
    if not getattr(place.parent, "multi_query", False):
        return _per_head(place, rows)
    return _sections(rows, _number(place, _HEADS) or 1, 1)


def _code_gen(place: Place, rows: int) -> tuple[str, str]:
    return "(r=4 b=3 r)", ": q, v, k, in four parts"


_OTHER_ORDERS: dict[str, Callable[[Place, int], tuple[str, str]]] = {
    "BloomAttention": _per_head,
    "CodeGenAttention": _code_gen,
    "FalconAttention": _falcon,
    "FalconFlashAttention2": _falcon,
    "GPTBigCodeAttention": _big_code,
    "GPTNeoXAttention": _per_head,
    "GPTNeoXJapaneseAttention": _per_head,
    "MiniMaxLightningAttention": _per_head,
    "PersimmonAttention": _per_head,
}
"""Attention modules whose fused weight is not q, then k, then v, by the name of their class."""
