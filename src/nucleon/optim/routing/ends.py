"""Which weights end a network, by their widths and the order in which modules were registered.

A weight does not end a network where one registered later takes as many numbers as it gives:

    hidden = Linear(8, 8);  last = Linear(8, 5)        last ends it
    policy = Linear(8, 3);  value = Linear(8, 1)       both do

A convolution that gives its numbers in every place of an image ends a network as a Linear does.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from nucleon.optim.routing import fused

MAPS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
"""What may end a network."""
ADAPTERS = re.compile(r"(^|\.)(lora_|hada_|lokr_|parametrizations\.|\w*modulation|adaln)", re.I)
"""What stands beside a weight, makes it up, or shifts and scales what goes in, as in DiT."""
_ROUTERS = re.compile(r"rout(er|ing)$|^gat(e|ing)$", re.IGNORECASE)
"""What chooses among experts, of which there may be as many as classes."""


def weighted(module: nn.Module) -> list[nn.Module]:
    """The modules within that hold a weight of their own, adapters left out."""
    return [
        inner
        for path, inner in module.named_modules()
        if not ADAPTERS.search(path) and _has_weight(inner)
    ]


def takes(module: nn.Module) -> set[int]:
    """The widths that a module with a weight may take."""
    return _widths(module)[0]


def gives(module: nn.Module) -> int | None:
    """The width that a module with a weight gives; None where its shapes do not tell."""
    return _widths(module)[1]


def ends(module: nn.Module, kinds: tuple[type[nn.Module], ...] = MAPS) -> list[nn.Module]:
    """The maps that end a network: those of its last child, and of the children beside it.

    A child stands beside the later ones where it takes what they take and none takes what it gives.
    """
    if isinstance(module, kinds):
        return [module]
    inside = [
        child
        for name, child in module.named_children()
        if not (ADAPTERS.search(name) or _ROUTERS.search(name)) and fused.parts(name) == 1
        if any(isinstance(m, kinds) and trains(m) and fused.is_map(m) for m in weighted(child))
    ]
    if isinstance(module, nn.Sequential):
        inside = inside[-1:]
    found: list[nn.Module] = []
    for child in reversed(inside):
        if found and not _beside(child, found):
            break
        found.insert(0, child)
    return [end for child in found for end in ends(child, kinds)]


def begin_alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether both are plain networks of several layers, the first of which take the same."""
    plain = _is_plain(one) and _is_plain(other)
    return plain and takes(weighted(one)[0]) == takes(weighted(other)[0])


def _is_plain(module: nn.Module) -> bool:
    """Whether its weights are its children, several, and each takes what the one before gives."""
    order = [child for child in module.children() if _has_weight(child)]
    chained = all(gives(m) in takes(after) for m, after in pairwise(order))
    return len(order) > 1 and chained and order == weighted(module)


def begins(module: nn.Module) -> set[nn.Module]:
    """The first layers of its children that begin alike: they take the input, side by side."""
    children = list(module.children())
    return {
        weighted(child)[0]
        for child in children
        if any(other is not child and begin_alike(child, other) for other in children)
    }


def trains(module: nn.Module) -> bool:
    """Whether a weight that a module holds, or one that makes it up, has a gradient."""
    own = module.parameters(recurse=is_parametrized(module))
    return any(p.ndim >= 2 and p.requires_grad for p in own)


def _beside(child: nn.Module, others: Sequence[nn.Module]) -> bool:
    if isinstance(child, nn.ModuleList | nn.ModuleDict) and not any(
        isinstance(entry, (*MAPS, nn.Sequential)) for entry in child.children()
    ):
        return False  # layers, on which the others stand
    if any(begin_alike(child, other) for other in others):
        return True
    later = [m for other in others for m in weighted(other)]
    taken = {side for m in later for side in takes(m)}
    own = [gives(end) or 0 for end in ends(child)]
    given = {*own, sum(own)}  # joined, as the heads of attention are
    if not _in_order(child):
        given |= {width for m in weighted(child) if (width := gives(m)) is not None}
    return takes(weighted(child)[0]) == takes(later[0]) and not given & taken


def _in_order(module: nn.Module) -> bool:
    """Whether the last weight within is the one that ends it: a flat module, not a stack of blocks.

    The last weight of a block may be a router, or one that works before the end of the block.
    """
    depths = [path.count(".") for path, m in module.named_modules() if isinstance(m, MAPS)]
    return max(depths) < 2


def _widths(module: nn.Module) -> tuple[set[int], int | None]:
    for kind in ("features", "channels"):
        width, out = (getattr(module, f"{way}_{kind}", None) for way in ("in", "out"))
        if isinstance(width, int) and isinstance(out, int):
            return {width}, out
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return set(), module.embedding_dim
    if isinstance(module, nn.Bilinear):
        return {module.in1_features, module.in2_features}, module.out_features
    shapes = [p.shape for p in module.parameters(recurse=False) if p.ndim >= 2 and p.shape[0] > 1]
    if type(module).__name__ == "Conv1D":  # of transformers, stored transposed
        shapes = [cast("tuple[int, ...]", shape[::-1]) for shape in shapes]
    return {side for shape in shapes for side in shape[1:]}, shapes[0][0] if shapes else None


def _has_weight(module: nn.Module) -> bool:
    rows = 1 if isinstance(module, MAPS) else 2  # with one row: added to a batch
    own = any(p.ndim >= 2 and p.shape[0] >= rows for p in module.parameters(recurse=False))
    return own or is_parametrized(module)
