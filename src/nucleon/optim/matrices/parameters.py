"""Facts of a parameter beside its values: name, axes, and the reason of its route."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from nucleon.optim.matrices import axes
from nucleon.optim.matrices.axes import Block

_ADDED = "_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"
_WRAPPERS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(_ADDED)})\.")


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of an optimizer."""

    name: str
    """Name as given, without the parts that wrappers add, or its index."""
    index: int
    """Index over all groups, at the time when it was added."""
    axes: str | None = None
    """Spec of rows, columns and batch; None for a dimension without a default."""
    reason: str = "as given"
    """Reason of its route."""
    first_rate: float | Tensor = 0.0
    """Learning rate of its group when it was added."""


Infos = Mapping[Tensor, ParameterInfo]
"""Facts of each parameter."""


def canonical(name: str, root: str = "module.") -> str:
    """Return a name without the parts of activation checkpointing, the compiler and DDP.

    The name is from the root of the model; `root` is the prefix of DDP, see `root_of`.
    """
    return _WRAPPERS.sub("", name).removeprefix(root)


def root_of(names: Iterable[str]) -> str:
    """Return `module.`, the prefix of DDP, if all names begin with it, else ""."""
    return "module." if all(canonical(n, "").startswith("module.") for n in names) else ""


def globs(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return few globs that match all of `names` and none of `others`."""
    patterns: list[str] = []
    for name in names:
        if not any(fnmatchcase(name, glob) for glob in patterns):
            patterns.append(_glob(name, others))
    return patterns


def _glob(name: str, others: Sequence[str]) -> str:
    """Return the shortest unique end of a name, with numbers replaced from the left by `*`."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for specific in range(len(numbers) + 1):
        any_layer = set(numbers[: len(numbers) - specific])
        wild = ["*" if place in any_layer else part for place, part in enumerate(parts)]
        for count in range(1, len(parts) + 1):
            if wild[-count].isdigit():  # it would match the end of a longer number
                continue
            glob = "*" + ".".join(wild[-count:]).removeprefix("*")
            if not any(fnmatchcase(other, glob) for other in others):
                return glob
    return name


def blocks(param: Tensor, spec: str | None) -> tuple[Block, ...]:
    """Return the blocks of a parameter by the spec of its axes, or the default one."""
    text = spec or axes.default(param.ndim)
    if text is None:
        raise ValueError(
            f"a parameter has shape {tuple(param.shape)}; only 2-D matrices and 3-D stacks of "
            f'matrices need no axes: write them, as axes="r c c c" for a convolution, or give it '
            f"to AdamW"
        )
    return axes.parse(text, tuple(param.shape))
