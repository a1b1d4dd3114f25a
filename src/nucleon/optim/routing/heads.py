"""Which modules are the output heads of a model, by what the model itself tells.

1. What `get_output_embeddings()` returns, as Hugging Face models have it, and every module at the
   top of the model with one of the NAMES or a word such as "head" in its own.
2. Where neither tells, a module one level down with such a word.
3. A Linear that shares its weight with an embedding: with such a word always, else where nothing
   above tells.

Of a container the head is its last weight, of a list the last weight of each entry. A model that
tells nothing has no head: its last Linear is a matrix like the others.
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from nucleon.optim.matrices.parameters import canonical

NAMES = {
    *("action_net", "actor", "classifier", "cls", "critic", "embed_out", "fc", "fc_out", "head"),
    *("heads", "lm_head", "logits", "output", "output_layer", "output_projection", "qa_outputs"),
    *("score", "to_logits", "unembed", "value_net"),
}
_WORDS = re.compile(r"(^|_)(heads?|classifiers?|logits)(_|$)")
"""In "head_dist", "aux_head", "policy_head" and the like."""
WRAPPERS = {"module", "model", "base_model", "pretrained_model"}
"""What DistributedDataParallel, peft, trl and others put before the names of a model."""

_ADAPTERS = re.compile(r"(^|\.)(lora_|hada_|lokr_|parametrizations\.)")
"""What stands beside a weight or makes it up."""


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
        matched = [m for path, m in model.named_modules() if _matches(path, head)]
        weighted = [found for m in matched for found in _last_weighted(m)]
        if not weighted:
            raise ValueError(
                f"head={head!r} matches no module of {type(model).__name__} with a weight; pass a "
                f"glob over the names of model.named_modules(), or None if there is no head"
            )
        return dict.fromkeys(weighted, "output head, as told")
    top = {**_named(model, depth=1), **_told(model)}
    if top:
        return {**_tied(model, _WORDS), **top}
    return _named(model, depth=2) or _tied(model)


def missed(model: nn.Module) -> str | None:
    """The name of the last weight of a Linear, where a model without a head seems to have one.

    That is a model with an embedding, or one whose last weight changes the width.
    """
    trained = [
        (canonical(f"{path}.weight"), module)
        for path, module in model.named_modules()
        if not _ADAPTERS.search(path)
        and any(p.ndim >= 2 and p.requires_grad for p in module.parameters(recurse=False))
    ]
    linears = [(path, module) for path, module in trained if isinstance(module, nn.Linear)]
    if len(trained) < 2 or not linears:
        return None
    path, last = linears[-1]
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for _, m in trained)
    changes = last is trained[-1][1] and last.in_features != last.out_features
    return path if embeds or changes else None


def _matches(path: str, glob: str) -> bool:
    return fnmatchcase(path, glob) or fnmatchcase(canonical(path), glob)


def _told(model: nn.Module) -> Mapping[nn.Module, str]:
    for inner in _unwrapped(model):
        tell: Any = getattr(inner, "get_output_embeddings", None)
        found = tell() if callable(tell) else None
        if isinstance(found, nn.Module) and (weighted := _last_weighted(found)):
            return dict.fromkeys(weighted, "output head, by get_output_embeddings()")
    return {}


def _named(model: nn.Module, depth: int) -> Mapping[nn.Module, str]:
    """The heads by a name that is `depth` levels below the model or what it wraps."""
    found: dict[nn.Module, str] = {}
    for path, module in (item for inner in _unwrapped(model) for item in inner.named_modules()):
        *above, name = path.split(".")
        fits = _WORDS.search(name) or (depth == 1 and name in NAMES)
        if fits and len(above) == depth - 1:
            said = f"output head, by its name {path!r}"
            found |= dict.fromkeys(_last_weighted(module), said)
    return found


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what it wraps: a child of such a name, or the only one with parameters."""
    yield model
    if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return
    children = dict(model.named_children())
    trained = [name for name, child in children.items() if any(True for _ in child.parameters())]
    alone = len(trained) == 1 and not any(True for _ in model.parameters(recurse=False))
    for name in trained:
        if alone or not canonical(f"{name}.") or name in WRAPPERS:
            yield from _unwrapped(children[name])


def _tied(model: nn.Module, words: re.Pattern[str] | None = None) -> Mapping[nn.Module, str]:
    """Linears with the weight of an embedding, and one of the words in their name."""
    embeddings = {
        id(m.weight): path for path, m in model.named_modules() if isinstance(m, nn.Embedding)
    }
    return {
        m: f"output head, tied to {embeddings[id(m.weight)]}"
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear) and id(m.weight) in embeddings
        if words is None or words.search(path.rpartition(".")[2])
    }


def _last_weighted(module: nn.Module) -> list[nn.Module]:
    """The last module within that holds a weight, of a list or dict that of each entry.

    Adapters beside it are matrices like others.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [found for child in module.children() for found in _last_weighted(child)]
    weighted = [
        inner
        for path, inner in module.named_modules()
        if not _ADAPTERS.search(path) and _has_weight(inner)
    ]
    return weighted[-1:]


def _has_weight(module: nn.Module) -> bool:
    own = any(p.ndim >= 2 for p in module.parameters(recurse=False))
    return own or is_parametrized(module)
