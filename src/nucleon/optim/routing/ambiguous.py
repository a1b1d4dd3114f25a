"""Weights that contain several maps by their name, in an unknown layout.

Each is treated as one matrix, with a warning: one library stores q, k, v one after the other,
another stores them for each head. Names find such weights; sizes only exclude layouts.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nucleon.optim.matrices import axes
from nucleon.optim.routing.fused import number, sections, simplified

_MAPS = {
    "q, k, v": r"qkv|query_key_value|queries_keys_values|w_pack|c_attn",
    "gate and up": r"gate_up|^w1[23]$",
    "q, k": r"^(to_|linear_|w)?qk(_b)?(_proj|_linear|_points)?$",
    "k, v": r"^(to_|linear_|w)?kv(_b)?(_proj|_linear|_points)?$|keys_values",
    "latents, rotary keys": r"^kv_a_proj_with_mqa$",
}
"""Maps in one weight, and the names of such weights; the first that matches."""
_MODULATION = re.compile(r"ada_?(ptive_?)?(ln|layer_?norm|rms_?norm)", re.IGNORECASE)
"""Layers that make the shifts, scales and gates of a norm from a condition, as in DiT."""


def named(name: str) -> bool:
    """Return True if the name of a module indicates several maps."""
    return _maps(name) is not None or _MODULATION.search(name) is not None


def _maps(name: str) -> str | None:
    matched = (maps for maps, names in _MAPS.items() if re.search(names, name, re.IGNORECASE))
    return next(matched, None)


def layouts(parent: nn.Module | None, name: str, rows: int, columns: int) -> dict[str, str] | None:
    """Return the layouts that a name and a shape allow; None for a single map.

    Args:
        parent: the module that uses the map.
        name: the name of the map there.
        rows: the number of outputs.
        columns: the number of inputs.

    Returns:
        {meaning: word of the output axis}, see `nucleon.optim.matrices.axes`.
    """
    if rows == getattr(parent, "head_dim", None):  # one head whose keys are its values
        return None
    mixes = any(hasattr(parent, child) for child in ("dt_proj", "A_log"))
    if name in ("in_proj", "x_proj") and mixes:
        words = _of_state_space(parent, name, rows)
    elif _MODULATION.search(type(parent).__name__) or _MODULATION.search(name):
        if rows % columns or not 2 <= rows // columns <= 9:
            return None
        words = iter([("shifts, scales and gates one after the other", f"(b={rows // columns} r)")])
    elif (maps := _maps(name)) is not None:
        words = _of_attention(parent, maps, rows, columns)
    else:
        return None
    return {meaning: word for meaning, word in words if _fits(word, rows)}


def _of_attention(parent: Any, maps: str, rows: int, columns: int) -> Iterator[tuple[str, str]]:
    """Yield the layouts of q, k, v, of pairs of them, and of gate and up."""
    if maps == "latents, rotary keys":
        latents, keys = number(parent, "kv_lora_rank"), number(parent, "qk_rope_head_dim")
        if latents and keys:
            yield "latents, then rotary keys", sections(latents, keys)
        return
    count = 3 if maps == "q, k, v" else 2
    yield f"{maps} one after the other, as chunk cuts them", f"(b={count} r)"
    if maps == "gate and up":
        yield f"{maps} row by row in turn, as x[..., ::2] takes one", "(r b=2)"
        return
    if count == 3 and columns < rows < 3 * columns:
        pair = (rows - columns) // 2
        yield "q as wide as the input, then fewer k and v", sections(columns, pair, pair)
    key, value = number(parent, "qk_nope_head_dim"), number(parent, "v_head_dim")
    heads = number(parent, "heads")
    if maps == "k, v":
        heads = number(parent, "kv_heads") or heads
    if count == 2 and key and value:
        yield f"head by head, in each {maps}", simplified(f"(r {sections(key, value)})")
    elif heads:
        yield f"head by head, in each {maps}", f"(r={heads} b={count} r)"


def _of_state_space(parent: Any, name: str, rows: int) -> Iterator[tuple[str, str]]:
    """Yield the layouts of Mamba's projections, by the sizes of the maps beside them."""
    step, inner = (
        getattr(getattr(parent, child, None), "in_features", 0) for child in ("dt_proj", "out_proj")
    )
    rates = getattr(parent, "A_log", None)
    if name == "x_proj":
        state = (rows - step) // 2
        if step:
            yield "dt, B, C", sections(step, state, state)
    elif isinstance(rates, Tensor) and rates.ndim == 1 and not step:
        state = (rows - 2 * inner - len(rates)) // 2
        yield "z, x, B, C, dt", sections(inner, inner, state, state, len(rates))
    else:
        yield "x and z one after the other", "(b=2 r)"


def _fits(word: str, rows: int) -> bool:
    try:
        axes.parse(f"{word} c", (rows, 1))
    except ValueError:
        return False
    return True
