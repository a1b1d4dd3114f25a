"""Output heads of a model, by its methods, tied weights and a short list of names.

1. The module that `get_output_embeddings()` of Hugging Face models returns, and every Linear that
   shares its weight with an embedding.
2. A module at the top of the model with one of the NAMES, or with a word such as "head" in its
   name. The head of a container is a child with such a name, else its last map that is not square;
   every entry of a list is searched.
3. At any depth the names of language heads, and those of classes, boxes and scores of a detector.
4. If these rules find no head, rule 2 one level down.
5. A square map, an embedding or a class of INNER is never a head by its name.
6. If no head is found, one warning names the last map.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from nucleon.optim.matrices.parameters import canonical, root_of
from nucleon.optim.options import Head

NAMES = {
    *("action_net", "actor", "bbox_embed", "class_embed", "classifier", "cls", "critic"),
    *("embed_out", "fc", "fc_out", "head", "heads", "lm_head", "logits", "output", "output_layer"),
    *("output_projection", "qa_outputs", "score", "to_logits", "unembed", "value_net"),
}
INNER = re.compile(r"AttentionPoolingHead$|^BigBirdOutput$")
"""Classes with the name of a head that return features: the poolings of SigLIP and VideoPrism, and
a layer in BigBird's head for questions."""
_WORDS = {"head", "heads", "classifier", "classifiers", "logits"}
"""Words of "head_dist", "aux_head", "policy_head" and the like."""
_NO_HEAD = {
    *("attention", "attn", "gate", "kv", "mha", "multi", "n", "num", "pos"),
    *("conv", "pre", "roi"),
}
"""Words that make "head" an attention head, a position or a layer before the head."""
_ANYWHERE = re.compile(
    r"(^|\.)(lm_head|output_projection|embed_out)$"
    r"|(^|[._])((bbox|class)_(embed|head|predictor)|(prediction|score)_head|cls_score|bbox_pred)$"
)
_ADAPTERS = re.compile(r"(^|\.)(lora_|hada_|lokr_|parametrizations\.|\w*modulation|adaln)", re.I)
"""Modules of adapters, parametrizations and modulations, which are no heads."""
_WRAPPERS = {"module", "model", "base_model", "pretrained_model"}
"""Prefixes of DistributedDataParallel, peft, trl and others before the names of a model."""
_SIDES = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("in1_features", "out_features"),
)


def output_heads(model: nn.Module, head: Head) -> Mapping[nn.Module, str]:
    """Return the head modules, each with the reason.

    `head` is one or several globs over module names, "auto" for the rules above, or None.
    """
    if head is None:
        return {}
    if head != "auto":
        if isinstance(head, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError('head must be a name, not a module; write head="lm_head", for example')
        globs = [head] if isinstance(head, str) else head
        return {m: "output head, by head=" for glob in globs for m in _matched(model, glob)}
    inners = [*_unwrapped(model)]
    heads = _by_name((p, m) for p, m in model.named_modules() if _ANYWHERE.search(p))
    heads |= _by_name(_at_depth(inners, 1)) | _by_method(inners) | _tied(model)
    return heads or _by_name(_at_depth(inners, 2))


def last_map(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the last trainable map and its name; None for a model of a single weight."""
    holders = [m for m in model.modules() if any(p.ndim > 1 for p in m.parameters(recurse=False))]
    trained = [pair for pair in _maps(model) if any(p.requires_grad for p in _weights(pair[1]))]
    if len(holders) < 2 or not trained:
        return None
    path, module = trained[-1]
    return canonical(f"{path}.", _root(model)).removesuffix("."), module


def _by_method(inners: Sequence[nn.Module]) -> dict[nn.Module, str]:
    for inner in inners:
        method: Any = getattr(inner, "get_output_embeddings", None)
        head = method() if callable(method) else None
        if isinstance(head, nn.Module) and (maps := _heads_of(head, square=True)):
            return dict.fromkeys(maps, "output head, by get_output_embeddings()")
    return {}


def _tied(model: nn.Module) -> dict[nn.Module, str]:
    modules = dict(model.named_modules())
    paths = {id(m.weight): path for path, m in modules.items() if isinstance(m, nn.Embedding)}
    linears = [m for m in modules.values() if isinstance(m, nn.Linear) and id(m.weight) in paths]
    return {m: f"output head, tied to {paths[id(m.weight)]}" for m in linears}


def _at_depth(inners: Sequence[nn.Module], depth: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with the name of a head, `depth` levels below an unwrapped model."""
    for inner in inners:
        for path, module in inner.named_modules():
            if path.count(".") == depth - 1 and _is_named(path):
                yield path, module


def _by_name(modules: Iterable[tuple[str, nn.Module]]) -> dict[nn.Module, str]:
    return {
        head: f"output head, by its name {path!r}"
        for path, module in modules
        if not _ADAPTERS.search(path)
        for head in _heads_of(module)
    }


def _is_named(path: str) -> bool:
    name = path.rpartition(".")[2]
    words = set(name.split("_"))
    return name in NAMES or (bool(words & _WORDS) and not words & _NO_HEAD)


def _heads_of(module: nn.Module, *, square: bool = False) -> list[nn.Module]:
    """Return the heads in a module with the name of a head; `square` includes square maps."""
    if INNER.search(type(module).__name__) and not square:
        return []
    children = dict(module.named_children())
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        children = {name: child for name, child in children.items() if _is_named(name)}
    heads = [head for child in children.values() for head in _heads_of(child, square=square)]
    return heads or [m for _, m in _maps(module, square=square)][-1:]


def _maps(module: nn.Module, *, square: bool = True) -> list[tuple[str, nn.Module]]:
    """Return the inner modules that multiply by a weight, with their paths, without adapters."""
    return [
        (path, inner)
        for path, inner in module.named_modules()
        if not _ADAPTERS.search(path) and (sides := _sides(inner)) is not None
        if square or sides[0] != sides[1]
    ]


def _sides(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a map; None for other modules."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm | nn.RMSNorm):
        return None
    if not _weights(module):
        return None
    for names in _SIDES:
        before, after = (getattr(module, name, None) for name in names)
        if isinstance(before, int) and isinstance(after, int):
            depthwise = getattr(module, "groups", 1) == before > 1
            return None if depthwise else (before, after)
    weight = module._parameters.get("weight")
    return None if weight is None or weight.ndim < 2 else (weight.shape[-1], weight.shape[-2])


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of a module, and the parts of a parametrized weight."""
    return [p for p in module.parameters(recurse=is_parametrized(module)) if p.ndim > 1]


def _matched(model: nn.Module, glob: str) -> list[nn.Module]:
    paths, root = dict(model.named_modules()), _root(model)
    matched = [m for path, m in paths.items() if fnmatchcase(canonical(path, root), glob)]
    matched = matched or [m for path, m in paths.items() if fnmatchcase(path, glob)]
    heads = [head for m in matched for head in _heads_of(m, square=True)]
    if not heads:
        raise ValueError(
            f"head={glob!r} matches no module of {type(model).__name__} with a weight; pass a "
            f"glob over the names of model.named_modules(), or None if there is no head"
        )
    return heads


def _root(model: nn.Module) -> str:
    return root_of(name for name, _ in model.named_parameters())


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model, and the model that it wraps: a child of such a name, or its only one."""
    yield model
    if isinstance(model, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return
    children = dict(model.named_children())
    filled = [name for name, child in children.items() if any(True for _ in child.parameters())]
    alone = len(filled) == 1 and not any(True for _ in model.parameters(recurse=False))
    for name in filled:
        if alone or not canonical(f"{name}.", "") or name in _WRAPPERS:
            yield from _unwrapped(children[name])
