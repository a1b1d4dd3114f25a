"""What to train on: digits and text, in batches that are functions of (seed, index) alone.

No position is kept anywhere: a resumed run asks for the batch after its last one and gets what an
unbroken run would have got, and the ranks of a distributed run split each batch without talking.
"""

import ctypes
import errno
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from nucleon import _checks, noise
from nucleon.training.tokens import BytePairs, Characters, Tokenizer

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""
Tokens = Literal["char", "bpe"]

HELD_OUT = 0.1
"""The share of a text that is held out, its end; of the digits a fifth is."""
LEARNED_FROM = 1_000_000
"""Byte pairs are learned from so many characters of the training text."""
EVALUATED = 64
"""Windows of held-out text in an evaluation, spread evenly over it."""
_ORDER, _WINDOWS, _SPLIT = 0, 1, 2  # streams of the noise
_SPLIT_SEED = 0x646967697473  # the held-out digits are the same in every run
_NOT_SOURCES = {"__pycache__", "site-packages", "test", "tests", "idlelib", "lib2to3"}


class Data(Protocol):
    """Batches to learn from, and batches to judge by."""

    @property
    def fingerprint(self) -> str:
        """A hash of all of it: a run may be resumed on the same data only."""
        ...

    def batch(self, index: int, size: int, *, seed: int, rank: int = 0, world: int = 1) -> Batch:
        """Batch number `index`, of `size` examples; `rank` gets every `world`-th of them."""
        ...

    def held_out(self, size: int) -> Iterator[Batch]:
        """What is not trained on, in batches of `size` examples, always the same."""
        ...


@dataclass(frozen=True, eq=False)
class Examples:
    """Pairs of an input and a target, visited in a new random order each time around.

    Args:
        inputs: (n, …).
        targets: (n,) int64.
        test_inputs: (k, …), held out.
        test_targets: (k,) int64.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor

    @property
    def fingerprint(self) -> str:
        """A hash of all four tensors."""
        return _hash(self.inputs, self.targets, self.test_inputs, self.test_targets)

    def batch(self, index: int, size: int, *, seed: int, rank: int = 0, world: int = 1) -> Batch:
        """Examples index·size, …, of the endless sequence of shuffled visits."""
        count = len(self.targets)
        position = torch.arange(index * size, (index + 1) * size)[rank::world]
        rows = torch.empty_like(position)
        for visit in (position // count).unique().tolist():
            order = noise.uniform(
                (count,), seed=seed, stream=_ORDER, step=visit, dtype=torch.float64
            ).argsort(stable=True)
            here = position // count == visit
            rows[here] = order[position[here] % count]
        return self.inputs[rows], self.targets[rows]

    def held_out(self, size: int) -> Iterator[Batch]:
        """The test examples in order."""
        return zip(self.test_inputs.split(size), self.test_targets.split(size), strict=True)


@dataclass(frozen=True, eq=False)
class Text:
    """Windows of `context` + 1 tokens at random places: the inputs, and the same one token later.

    Args:
        tokens: (n,) int64.
        test_tokens: (k,) int64, held out.
        tokenizer: what made them.
        context: length of the inputs.
    """

    tokens: Tensor
    test_tokens: Tensor
    tokenizer: Tokenizer
    context: int

    def __post_init__(self) -> None:
        shortest = min(len(self.tokens), len(self.test_tokens))
        if shortest <= self.context:
            raise ValueError(
                f"the text is too short: its parts have {len(self.tokens)} and "
                f"{len(self.test_tokens)} tokens, a window has {self.context + 1}; give more text, "
                f"or a smaller context"
            )

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens."""
        return _hash(self.tokens, self.test_tokens)

    def batch(self, index: int, size: int, *, seed: int, rank: int = 0, world: int = 1) -> Batch:
        """`size` windows at places drawn from (seed, index)."""
        places = noise.uniform((size,), seed=seed, stream=_WINDOWS, step=index, dtype=torch.float64)
        last = len(self.tokens) - self.context  # ceil maps (0, 1] onto 1, …, last
        return self._windows(self.tokens, (places * last).ceil().long()[rank::world] - 1)

    def held_out(self, size: int) -> Iterator[Batch]:
        """Up to `EVALUATED` windows that do not overlap, spread evenly."""
        last = len(self.test_tokens) - self.context - 1
        count = min(EVALUATED, last // self.context + 1)
        starts = torch.linspace(0, last, count, dtype=torch.float64).long()
        return (self._windows(self.test_tokens, some) for some in starts.split(size))

    def _windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        windows = tokens[starts[:, None] + torch.arange(self.context + 1)]  # (b, context + 1)
        return windows[:, :-1], windows[:, 1:]


def digits() -> Examples:
    """scikit-learn's 1,797 handwritten digits of 8×8 pixels in [0, 1], a fifth of them held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn, which is not installed; "
            "pip install scikit-learn, or train on text"
        ) from error
    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.as_tensor(pixels, dtype=torch.float32) / 16
    targets = torch.as_tensor(classes, dtype=torch.int64)
    order = noise.uniform(
        (len(targets),), seed=_SPLIT_SEED, stream=_SPLIT, dtype=torch.float64
    ).argsort(stable=True)
    inputs, targets = inputs[order], targets[order]
    held = len(targets) // 5
    return Examples(inputs[held:], targets[held:], inputs[:held], targets[:held])


def text(content: str, *, tokens: Tokens = "char", vocabulary: int = 512, context: int) -> Text:
    """A text as tokens; its last tenth is held out.

    Args:
        content: the text.
        tokens: "char" or "bpe", byte pairs learned from the beginning of it ("char").
        vocabulary: most tokens of "bpe" (512); "char" has as many as there are characters.
        context: length of a window.
    """
    _checks.choice("tokens", tokens, get_args(Tokens))
    cut = len(content) - int(HELD_OUT * len(content))
    if tokens == "char":
        tokenizer: Tokenizer = Characters.of(content)
    else:
        tokenizer = BytePairs.learn(content[: min(cut, LEARNED_FROM)], vocabulary)
    return Text(
        tokenizer.encode(content[:cut]), tokenizer.encode(content[cut:]), tokenizer, context
    )


def read(place: Path | None, limit: int) -> str:
    """The first `limit` bytes of a file, or of the text files of a folder in order of their path.

    Without a place: of the sources of Python's standard library, which every machine has. Files
    with a zero byte are taken for something else than text, hidden ones are left out; bytes that
    are no UTF-8 become U+FFFD.
    """
    _checks.count("limit", limit)
    folder = Path(sysconfig.get_path("stdlib")) if place is None else place
    if not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", str(folder))
    files = _sources(folder, ".py" if place is None else "") if folder.is_dir() else [folder]
    content = b""
    for file in files:
        with file.open("rb") as opened:
            piece = opened.read(limit - len(content))
        if 0 not in piece:
            content += piece
        if len(content) >= limit:
            break
    if not content:
        raise ValueError(f"there is no text in {folder}; give a text file or a folder of them")
    return content.decode(errors="replace")


def _sources(folder: Path, suffix: str) -> list[Path]:
    """The files below a folder that end in `suffix`, by path; links to folders are not followed."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        if suffix:
            folders[:] = [name for name in folders if name not in _NOT_SOURCES]
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = (name for name in files if name.endswith(suffix) and not name.startswith("."))
        found += [Path(place, name) for name in here]
    return sorted(path for path in found if path.is_file())


def _hash(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        whole = tensor.contiguous()
        digest.update(ctypes.string_at(whole.data_ptr(), whole.nbytes))  # torch may lack NumPy
    return digest.hexdigest()
