"""Which modules are the output heads of a model, by what the model itself tells.

1. What `get_output_embeddings()` returns, as Hugging Face models have it, and every module at the
   top of the model with one of the NAMES or a word such as "head" in its own, where it ends the
   network: nothing registered later takes as many numbers as it gives, see `ends`.
2. Where neither tells, a module one level down with such a word, if only such follow it.
3. A Linear that shares its weight with an embedding: with such a word always, else where nothing
   above tells.

Of a container the head is its last weight, of a list the last weight of each entry. The heads of
attention ("multi_head_attention", "attn_heads", "num_heads") are none. A model that tells nothing
has no head: its last Linear is a matrix like the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from nucleon.optim.matrices.parameters import canonical
from nucleon.optim.options import Head
from nucleon.optim.routing.ends import ends, gives, takes, weighted

NAMES = {
    *("action_net", "actor", "classifier", "cls", "critic", "embed_out", "fc", "fc_out", "head"),
    *("heads", "lm_head", "logits", "output", "output_layer", "output_projection", "qa_outputs"),
    *("score", "to_logits", "unembed", "value_net"),
}
_WORDS = {"head", "heads", "classifier", "classifiers", "logits"}
"""In "head_dist", "aux_head", "policy_head" and the like."""
_ATTENTION = {"attention", "attn", "kv", "mha", "multi", "n", "num"}
"""Words beside which "head" is one of attention."""
WRAPPERS = {"module", "model", "base_model", "pretrained_model"}
"""What DistributedDataParallel, peft, trl and others put before the names of a model."""


def output_heads(model: nn.Module, head: Head) -> Mapping[nn.Module, str]:
    """The head modules, each with how it was found.

    Args:
        model: the model.
        head: a glob over module names or several, of a container its last weight; "auto" for the
            rules above, or None for no head.
    """
    _check(head)
    if head is None:
        return {}
    if head != "auto":
        globs = [head] if isinstance(head, str) else head
        return {found: "output head, as told" for glob in globs for found in _globbed(model, glob)}
    top = {**_named(model, depth=1), **_told(model)}
    if top:
        return {**_tied(model, words=True), **top}
    return _named(model, depth=2) or _tied(model)


def _check(head: object) -> None:
    items = cast(Sequence[object], head) if isinstance(head, Sequence) else ()
    if head is not None and not (items and all(isinstance(item, str) for item in items)):
        raise TypeError(
            f"head must be a glob over module names, a list of them, 'auto' or None, got {head!r}"
        )


@dataclass(frozen=True)
class Missed:
    """Heads that seem to be missed."""

    names: list[str]
    """Of the modules, those already found included."""
    some: bool
    """Whether one was found, and others stand beside it."""
    inner: bool
    """Whether the last is as wide as what the model has within, as where there is no head."""


def missed(model: nn.Module, heads: Mapping[nn.Module, str]) -> Missed | None:
    """The Linears that end a model, where not all of them are heads though they seem to be.

    They seem to be beside a head, in a model with an embedding, and where the last weight changes
    the width. Those that give what others within take are features, left out beside any other.
    """
    trained = [m for m in weighted(model) if any(p.requires_grad for p in m.parameters(False))]
    embeddings = [m for m in trained if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    within = {side for m in trained[1:] for side in takes(m)}
    within |= {m.embedding_dim for m in embeddings}
    found = ends(model)
    last = [(path, m) for path, m in found if m in heads or m.out_features not in within]
    names = [canonical(f"{path}.weight").removesuffix(".weight") for path, _ in last or found[-1:]]
    if heads:
        told = [module in heads for _, module in last]
        return Missed(names, some=True, inner=False) if any(told) and not all(told) else None
    final = [m for _, m in found]
    changes = any(m.in_features != m.out_features for m in final) and trained[-1] in final
    if len(trained) < 2 or not final or not (embeddings or changes):
        return None
    return Missed(names, some=False, inner=not last)


def _globbed(model: nn.Module, glob: str) -> list[nn.Module]:
    matched = [m for path, m in model.named_modules() if _matches(path, glob)]
    found = [last for m in matched for last in _last_weighted(m)]
    if not found:
        raise ValueError(
            f"head={glob!r} matches no module of {type(model).__name__} with a weight; pass a "
            f"glob over the names of model.named_modules(), or None if there is no head"
        )
    return found


def _matches(path: str, glob: str) -> bool:
    return fnmatchcase(path, glob) or fnmatchcase(canonical(path), glob)


def _told(model: nn.Module) -> Mapping[nn.Module, str]:
    for inner in _unwrapped(model):
        tell: Any = getattr(inner, "get_output_embeddings", None)
        found = tell() if callable(tell) else None
        if isinstance(found, nn.Module) and (weighted := _last_weighted(found)):
            return dict.fromkeys(weighted, "output head, by get_output_embeddings()")
    return {}


@dataclass(frozen=True)
class _Candidate:
    path: str
    module: nn.Module
    heads: list[nn.Module]
    says: bool
    """Whether a word in its name says that it is a head."""


def _named(model: nn.Module, depth: int) -> Mapping[nn.Module, str]:
    """The heads by a name that is `depth` levels below the model or what it wraps."""
    found: list[_Candidate] = []
    for path, module in (item for inner in _unwrapped(model) for item in inner.named_modules()):
        *above, name = path.split(".")
        says = _says_head(name)
        if len(above) == depth - 1 and (says or (depth == 1 and name in NAMES)):
            found.append(_Candidate(path, module, _last_weighted(module), says))
    order = weighted(model)
    inside = {m for each in found for m in weighted(each.module)}
    sure = {m for each in found if each.says for m in weighted(each.module)}
    heads: dict[nn.Module, str] = {}
    for each in found:
        for head in each.heads:
            later = order[order.index(head) + 1 :]
            if depth == 1 and _is_taken(each, head, later, sure):
                continue
            if depth == 1 or inside.issuperset(later):
                heads[head] = f"output head, by its name {each.path!r}"
    return heads


def _says_head(name: str) -> bool:
    words = set(name.split("_"))
    return bool(words & _WORDS) and not words & _ATTENTION


def _is_taken(
    own: _Candidate, head: nn.Module, later: Sequence[nn.Module], sure: set[nn.Module]
) -> bool:
    """Whether a later module may take what a head gives, or all those of a list side by side.

    A head as wide as what it takes stands beside others that are named so.
    """
    width = gives(head)
    square = own.says and width in takes(head)
    if any(width in takes(m) for m in later if not (square and m in sure)):
        return True
    together = sum(gives(m) or 0 for m in own.heads)
    outside = set(later) - set(weighted(own.module))
    return len(own.heads) > 1 and any(together in takes(m) for m in outside)


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


def _tied(model: nn.Module, *, words: bool = False) -> Mapping[nn.Module, str]:
    """Linears with the weight of an embedding; with one of the words in their name, if asked."""
    embeddings = {
        id(m.weight): path for path, m in model.named_modules() if isinstance(m, nn.Embedding)
    }
    return {
        m: f"output head, tied to {embeddings[id(m.weight)]}"
        for path, m in model.named_modules()
        if isinstance(m, nn.Linear) and id(m.weight) in embeddings
        if not words or _says_head(path.rpartition(".")[2])
    }


def _last_weighted(module: nn.Module) -> list[nn.Module]:
    """The last module within that holds a weight, of a list or dict that of each entry.

    Adapters beside it are matrices like others.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [found for child in module.children() for found in _last_weighted(child)]
    return weighted(module)[-1:]
