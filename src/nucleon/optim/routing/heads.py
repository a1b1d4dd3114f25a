"""Which modules are the output heads of a model, by what the model itself tells.

1. What `get_output_embeddings()` returns, as Hugging Face models have it.
2. A module at the top of the model with one of the NAMES; of a container, its last weight.
3. Where neither tells, a Linear that shares its weight with an embedding.

A model that tells nothing has no head: its last Linear is a matrix like the others.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

NAMES = {
    *("classifier", "embed_out", "fc", "fc_out", "head", "heads", "lm_head", "logits", "output"),
    *("output_layer", "output_projection", "qa_outputs", "score", "to_logits", "unembed"),
}
WRAPPERS = {"module", "model", "base_model", "_orig_mod"}
"""What DistributedDataParallel, peft, torch.compile and others put before the names of a model."""


def output_heads(model: nn.Module, head: str | None) -> Mapping[nn.Module, str]:
    """The head modules, each with how it was found.

    Args:
        model: the model.
        head: a glob over module names, of a container its last weight; "auto" for the rules above,
            or None for no head.
    """
    if head is None:
        return {}
    if not isinstance(head, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"head must be a glob over module names, 'auto' or None, got {head!r}")
    if head != "auto":
        matched = [m for path, m in model.named_modules() if fnmatchcase(path, head)]
        weighted = [found for m in matched if (found := _last_weighted(m)) is not None]
        if not weighted:
            raise ValueError(
                f"head={head!r} matches no module of {type(model).__name__} with a weight; pass a "
                f"glob over the names of model.named_modules(), or None if there is no head"
            )
        return dict.fromkeys(weighted, "output head, as told")
    return _told(model) or _named(model) or _tied(model)


def _told(model: nn.Module) -> Mapping[nn.Module, str]:
    tell: Any = getattr(model, "get_output_embeddings", None)
    found = tell() if callable(tell) else None
    weighted = _last_weighted(found) if isinstance(found, nn.Module) else None
    return {weighted: "output head, by get_output_embeddings()"} if weighted else {}


def _named(model: nn.Module) -> Mapping[nn.Module, str]:
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        parts = path.split(".")
        while len(parts) > 1 and parts[0] in WRAPPERS:
            del parts[0]
        if len(parts) == 1 and parts[0] in NAMES:
            weighted = _last_weighted(module)
            if weighted is not None:
                found[weighted] = f"output head, by its name {parts[0]!r}"
    return found


def _tied(model: nn.Module) -> Mapping[nn.Module, str]:
    embeddings = {
        id(m.weight): path for path, m in model.named_modules() if isinstance(m, nn.Embedding)
    }
    return {
        m: f"output head, tied to {embeddings[id(m.weight)]}"
        for m in model.modules()
        if isinstance(m, nn.Linear) and id(m.weight) in embeddings
    }


def _last_weighted(module: nn.Module) -> nn.Module | None:
    """The last module within that holds a weight; adapters beside it are matrices like others."""
    weighted = [
        inner
        for path, inner in module.named_modules()
        if "lora_" not in path and any(p.ndim >= 2 for p in inner.parameters(recurse=False))
    ]
    return weighted[-1] if weighted else None
