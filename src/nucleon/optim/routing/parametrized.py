"""Parts of a parametrized weight, by torch's parametrizations or the older hooks.

weight_norm     W = g·V/‖V‖: V has the role of the weight, the lengths g are no matrix
spectral_norm   W = V/σ₁(V): V has the role of the weight
pruning         W = V∘mask: V has the role of the weight
others          the parameter does not multiply, so it is no matrix
"""

from typing import Any, cast

from torch import nn

_SCALED = {
    "_WeightNorm": ("original1", "weight_norm"),
    "_SpectralNorm": ("original", "spectral_norm"),
}
"""{class of a parametrization: (parameter that is the weight up to a scale, its name)}."""
_LENGTHS = "the lengths of weight_norm"


def weight(module: nn.Module, path: str, key: str) -> tuple[str | None, str] | None:
    """Return the weight that a parameter equals up to a scale, or None, and the parametrization.

    Args:
        module: the module that uses the weight.
        path: path of the module that contains the parameter, from the root.
        key: its name there.

    Returns:
        (name or None, explanation), or None for a parameter that is no part of a weight.
    """
    *_, holder, name = "", *path.split(".")
    if holder == "parametrizations":
        return _parametrized(cast(Any, module).parametrizations[name], name, key)
    stem, _, end = key.rpartition("_")
    if end in ("v", "g") and {f"{stem}_v", f"{stem}_g"} <= set(module._parameters):
        return (stem, "under weight_norm") if end == "v" else (None, _LENGTHS)
    if end == "orig" and stem:
        pruned = f"{stem}_mask" in module._buffers
        return stem, "under pruning" if pruned else "under spectral_norm"
    return None


def _parametrized(steps: nn.ModuleList, name: str, key: str) -> tuple[str | None, str]:
    kinds = [type(step).__name__ for step in steps]
    original, how = _SCALED.get(kinds[0], ("", "")) if len(kinds) == 1 else ("", "")
    if key == original:
        return name, f"under {how}"
    if how:
        return None, _LENGTHS
    return None, f"parametrized by {', '.join(kinds)}: not what multiplies"
