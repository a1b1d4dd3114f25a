"""Which modules are the output heads of a model, by what the model itself tells.

1. What `get_output_embeddings()` returns, as Hugging Face models have it, and every module at the
   top of the model with one of the NAMES or a word such as "head" in its own, where it ends the
   network: nothing registered later takes as many numbers as it gives, see `ends`.
2. Where neither tells, a module one level down with such a word, if only such follow it, or parts
   of the model that end with one.
3. A Linear that shares its weight with an embedding: with such a word always, else where nothing
   above tells.
4. Beside these, a module at any depth with such a word, if nothing in the model takes as many
   numbers as it gives, and the classes, boxes and scores of a detector.
5. A Linear or convolution that gives as many numbers as one of these, if nothing takes as many: an
   auxiliary head. Where that is one number, only in the same module.

Of a container the head is its last weight, of a list the last weight of each entry. The heads of
attention ("multi_head_attention", "attn_heads", "num_heads") are none. A model that tells nothing
has no head: its last Linear is a matrix like the others.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from nucleon.optim.matrices.parameters import canonical, root_of
from nucleon.optim.options import Head
from nucleon.optim.routing.ends import (
    ADAPTERS,
    begin_alike,
    begins,
    ends,
    gives,
    takes,
    trains,
    weighted,
)

NAMES = {
    *("action_net", "actor", "bbox_embed", "class_embed", "classifier", "cls", "critic"),
    *("embed_out", "fc", "fc_out", "head", "heads", "lm_head", "logits", "output", "output_layer"),
    *("output_projection", "qa_outputs", "score", "to_logits", "unembed", "value_net"),
}
_WORDS = {"head", "heads", "classifier", "classifiers", "logits"}
"""In "head_dist", "aux_head", "policy_head" and the like."""
_SURE = {"embed_out", "output_projection", "unembed"}
"""Names that are those of a head at any depth."""
_NO_HEAD = {"attention", "attn", "gate", "kv", "mha", "multi", "n", "num", "pos"}
"""Words beside which "head" is one of attention or of positions."""
_DETECTOR = re.compile(
    r"(^|_)((bbox|class)_(embed|head|predictor)|(prediction|score)_head|cls_score|bbox_pred)$"
)
"""Classes, boxes and scores of a detector, of which some go back into its layers."""
_GATES = re.compile(r"rout(er|ing)|gate|gating|attention|attn", re.IGNORECASE)
"""Weights of experts and of attention, of which there may be as many as classes."""
_POOLS = "; if it weighs what is pooled instead, overrides may make it a 'matrix'"
"""Of "score" beside another head, which it may come before as the weights of attention."""
_PRE = re.compile(r"(^|[._])pre_")
"""Before "logits" or "head": what comes before them."""
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
    found = {**_tied(model, words=True), **top} if top else _named(model, depth=2) or _tied(model)
    found = {**_within(model), **found}
    return {**_as_many(model, found), **found}


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
    """Of the modules that seem to be heads."""
    known: list[str]
    """Those that were found."""
    inner: bool
    """Whether the last is as wide as what the model has within, as where there is no head."""


def missed(model: nn.Module, heads: Mapping[nn.Module, str]) -> Missed | None:
    """The maps that end a model, where not all of them are heads though they seem to be.

    They seem to be beside a head, in a model with an embedding, and where the last weight changes
    the width. Those that give what others within take are features, left out beside any other.
    """
    trained = [m for m in weighted(model) if trains(m)]
    if not trained:
        return None  # adapters alone
    taken = _taken_within(trained, set() if heads else begins(model))
    found = ends(model)
    last = [m for m in found if m in heads or gives(m) not in taken]
    if not last:  # the end is an image as deep as others within: the Linears may tell more
        found = ends(model, (nn.Linear,))
        last = [m for m in found if m in heads or gives(m) not in taken]
    names = [_path(model, m) for m in last or found[-1:]]
    if heads:
        return _beside_or_behind(model, heads, last, trained[-1])
    embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in trained)
    changes = any(gives(m) not in takes(m) for m in found) and trained[-1] in found
    alone = len(weighted(model)) < 2
    if alone or not found or not (embeds or (changes and last)):
        return None
    return Missed(names, [], inner=not last)


def _beside_or_behind(
    model: nn.Module, heads: Mapping[nn.Module, str], last: Sequence[nn.Module], final: nn.Module
) -> Missed | None:
    """What ends a model beside the heads that were found, or behind all of them."""
    last = [m for m in last if m in heads or isinstance(m, nn.Linear) or _at_top(model, m)]
    told = [m in heads for m in last]
    behind = final in last and (_at_top(model, final) or not _in_layers(model, final))
    if all(told) or not (any(told) or behind):
        return None
    names = [_path(model, m) for m in last if m not in heads]
    return Missed(names, [_path(model, head) for head in heads], inner=False)


def _taken_within(trained: Sequence[nn.Module], first: set[nn.Module]) -> set[int]:
    """The widths that modules take from each other, those of embeddings included.

    What the first module takes is the input, and so is what a convolution takes that nothing
    before it gives: an image, of which a network may give one as deep.

    Args:
        trained: the modules that train, in the order in which they were registered.
        first: those that begin a network.
    """
    taken = {m.embedding_dim for m in trained if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    given = {gives(m) for m in trained[:1]}
    for m in trained[1:]:
        of_image = hasattr(m, "in_channels") and not takes(m) & given
        if m not in first and not of_image:
            taken |= takes(m)
        given.add(gives(m))
    return taken


def doubtful(model: nn.Module, heads: Mapping[nn.Module, str]) -> list[str]:
    """The Linears with the name of a head that are none, as a later weight may take what they give.

    Only where a head was found, so that nothing else is said. Such are those at the top, and those
    with which a part of the model ends.
    """
    if not heads:
        return []
    found = _candidates(model, depth=1)
    if not any(head in heads for each in found for head in each.heads):
        found += _candidates(model, depth=2)
    order = weighted(model)
    inside = {m for each in found for m in weighted(each.module)}
    names: dict[str, None] = {}
    for each in found:
        ended = inside | _ended(each, inside)
        for head in each.heads:
            top = "." not in each.path and (head is each.module or _narrows(head))
            behind = ended.issuperset(order[order.index(head) + 1 :]) and _is_last(
                head, each.module
            )
            if isinstance(head, nn.Linear) and head not in heads and each.says and (top or behind):
                names[_path(model, head)] = None
    return [name for name in names if not _PRE.search(name)]


def _is_last(head: nn.Module, module: nn.Module) -> bool:
    """Whether no norm follows within: what goes on behind its weight is a hidden layer."""
    own = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return own[-1] is head


def _at_top(model: nn.Module, module: nn.Module) -> bool:
    return any(module is child for inner in _unwrapped(model) for child in inner.children())


def _in_layers(model: nn.Module, module: nn.Module) -> bool:
    """Whether it belongs to one of many layers."""
    return any(
        module in each.modules() for each in model.modules() if isinstance(each, nn.ModuleList)
    )


def _path(model: nn.Module, module: nn.Module) -> str:
    found = next(path for path, m in model.named_modules() if m is module)
    return canonical(f"{found}.weight", _root(model)).removesuffix(".weight")


def _root(model: nn.Module) -> str:
    return root_of(name for name, _ in model.named_parameters())


def _globbed(model: nn.Module, glob: str) -> list[nn.Module]:
    paths, root = dict(model.named_modules()), _root(model)
    matched = [m for path, m in paths.items() if fnmatchcase(canonical(path, root), glob)]
    matched = matched or [m for path, m in paths.items() if fnmatchcase(path, glob)]
    found = [last for m in matched for last in _last_weighted(m)]
    if not found:
        raise ValueError(
            f"head={glob!r} matches no module of {type(model).__name__} with a weight; pass a "
            f"glob over the names of model.named_modules(), or None if there is no head"
        )
    return found


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
    root: nn.Module
    """The model, or what it wraps, in which the path begins."""


def _candidates(model: nn.Module, depth: int) -> list[_Candidate]:
    """The modules with the name of a head, `depth` levels below the model or what it wraps."""
    found: list[_Candidate] = []
    for inner in _unwrapped(model):
        for path, module in inner.named_modules():
            *above, name = path.split(".")
            says = _says_head(name)
            named = says or (depth == 1 and name in NAMES)
            if len(above) == depth - 1 and named and not ADAPTERS.search(path):
                found.append(_Candidate(path, module, _last_weighted(module), says, inner))
    return found


def _named(model: nn.Module, depth: int) -> Mapping[nn.Module, str]:
    """The heads by a name that is `depth` levels below the model or what it wraps."""
    found = _candidates(model, depth)
    order = weighted(model)
    inside = {m for each in found for m in weighted(each.module)}
    sure = {m for each in found if each.says for m in weighted(each.module)}
    heads: dict[nn.Module, str] = {}
    for each in found:
        ended = inside | _ended(each, inside)
        alike = [x for x in found if x is not each and begin_alike(each.module, x.module)]
        twins = {m for twin in alike for m in weighted(twin.module)}  # as actor and critic
        for head in each.heads:
            later = order[order.index(head) + 1 :]
            only_such = depth > 1 and inside.issuperset(later)
            ends_part = depth == 1 or ended.issuperset(later)
            later = [m for m in later if m not in twins]
            if only_such or (ends_part and not _is_taken(each, head, later, sure)):
                heads[head] = f"output head, by its name {each.path!r}"
                if each.path == "score" and len(found) > 1:
                    heads[head] += _POOLS
    return heads


def _ended(own: _Candidate, inside: set[nn.Module]) -> set[nn.Module]:
    """All of the parts of a model that end with a head, but for the part that `own` is in."""
    within = own.path.partition(".")[0]
    parts = [weighted(part) for name, part in own.root.named_children() if name != within]
    return {m for part in parts if part and part[-1] in inside for m in part}


def _within(model: nn.Module) -> Mapping[nn.Module, str]:
    """The heads at any depth: nothing takes what they give, or they are those of a detector."""
    taken = {side for m in weighted(model)[1:] for side in takes(m)}  # the first takes the input
    heads: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        *above, name = path.split(".")
        detects = bool(_DETECTOR.search(name))
        says = name in _SURE or _says_head(name)
        if detects or (above and says and "router" not in above):
            found = _last_weighted(module)
            joined = len(found) > 1 and sum(gives(m) or 0 for m in found) in taken
            if joined and not detects:  # the heads of attention
                continue
            for head in found:
                ends_here = _narrows(head) if detects else gives(head) not in taken
                if isinstance(head, nn.Linear | nn.Conv2d) and ends_here:
                    heads[head] = f"output head, by its name {path!r}"
    return heads


def _as_many(model: nn.Module, heads: Mapping[nn.Module, str]) -> Mapping[nn.Module, str]:
    """What gives as many numbers as a head, to nothing, is one too."""
    taken = {side for m in weighted(model)[1:] for side in takes(m)}
    widths = {gives(head): _path(model, head) for head in heads}
    parents = {path.rpartition(".")[0] for path, m in model.named_modules() if m in heads}
    weights = {param for head in heads for param in head.parameters()}
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        left_out = ADAPTERS.search(path) or _GATES.search(path)
        known = weights.intersection(module.parameters(recurse=False))
        if left_out or known or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        width = gives(module)
        beside = width != 1 or path.rpartition(".")[0] in parents
        if width in widths and width not in taken and beside:
            found[module] = f"output head, as wide as {widths[width]}"
    return found


def _says_head(name: str) -> bool:
    words = set(name.split("_"))
    return bool(words & _WORDS) and not words & _NO_HEAD


def _is_taken(
    own: _Candidate, head: nn.Module, later: Sequence[nn.Module], sure: set[nn.Module]
) -> bool:
    """Whether a later module may take what a head gives, or all those of a list side by side.

    A head as wide as what it takes stands beside others as wide that are named so.
    """
    width = gives(head)
    square = own.says and width in takes(head)
    if any(width in takes(m) for m in later if not (square and m in sure and gives(m) == width)):
        return True
    if isinstance(head, nn.Linear) and any(_unflattened(head, m) for m in later):
        return True
    together = sum(gives(m) or 0 for m in own.heads)
    outside = set(later) - set(weighted(own.module))
    return len(own.heads) > 1 and any(together in takes(m) for m in outside)


def _unflattened(linear: nn.Linear, later: nn.Module) -> bool:
    """Whether a convolution may take what a Linear gives as the channels of an image."""
    channels = getattr(later, "in_channels", 0)
    return 1 < channels < linear.out_features and linear.out_features % channels == 0


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what it wraps: a child of such a name, or the only one with parameters."""
    yield model
    if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return
    children = dict(model.named_children())
    trained = [name for name, child in children.items() if any(True for _ in child.parameters())]
    alone = len(trained) == 1 and not any(True for _ in model.parameters(recurse=False))
    for name in trained:
        if alone or not canonical(f"{name}.", "") or name in WRAPPERS:
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

    Where others within take what it gives, it is the last that gives less than it takes to none of
    them. Adapters beside it are matrices like others.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [found for child in module.children() for found in _last_weighted(child)]
    inside = weighted(module)
    if isinstance(module, nn.Sequential) or not inside:
        return inside[-1:]
    taken = {side for m in inside for side in takes(m)}
    free = [m for m in inside if _narrows(m) and gives(m) not in taken]
    return free[-1:] if free and gives(inside[-1]) in taken else inside[-1:]


def _narrows(module: nn.Module) -> bool:
    width = gives(module)
    return width is not None and all(width < side for side in takes(module) or {0})
