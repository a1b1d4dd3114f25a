"""Text ↔ tokens: characters, or byte pairs learned from the text itself.

A byte-pair vocabulary begins as the 256 bytes and repeatedly adds the most frequent pair of
neighbours as a new token (Gage 1994; Sennrich, Haddow and Birch 2016). Pairs do not cross words.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from nucleon import _checks

# A word with its leading space, a run of signs likewise, or white space: together, all of a text.
_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")
BYTES = 256

Pair = tuple[int, int]


class Tokenizer(Protocol):
    """Text ↔ tokens, without loss."""

    @property
    def size(self) -> int:
        """Number of different tokens."""
        ...

    def encode(self, text: str) -> Tensor:
        """The tokens of a text: (n,) int64."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


@dataclass(frozen=True)
class Characters:
    """One token a character, numbered in the order of Unicode.

    Args:
        characters: the vocabulary.
    """

    characters: str

    @classmethod
    def of(cls, text: str) -> "Characters":
        """The characters that occur in `text`."""
        return cls("".join(sorted(set(text))))

    @property
    def size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The tokens of a text that is made of these characters: (n,) int64."""
        known, codes = _codes(self.characters), _codes(text)
        tokens = torch.searchsorted(known, codes).clamp_(max=self.size - 1)
        strange = known[tokens] != codes
        if strange.any():
            found = chr(int(codes[strange][0]))
            raise ValueError(f"text has {found!r}, which is not among the {self.size} characters")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        return "".join(self.characters[token] for token in tokens)


@dataclass(frozen=True)
class BytePairs:
    """One token a byte or a frequent sequence of bytes.

    Args:
        merges: the pairs in the order in which they were learned; pair i is the token 256 + i.
    """

    merges: tuple[Pair, ...]

    @classmethod
    def learn(cls, text: str, size: int) -> "BytePairs":
        """The `size` − 256 most frequent pairs, one after the other; fewer where none repeats.

        Among equally frequent pairs the smallest numbers win, so equal texts give equal tokens.
        """
        _checks.count("size", size, minimum=BYTES)
        counted = Counter(_WORD.findall(text))
        words = [list(word.encode()) for word in counted]
        weights = list(counted.values())
        counts: Counter[Pair] = Counter()
        homes: defaultdict[Pair, set[int]] = defaultdict(set)  # the words a pair occurs in
        for index, word in enumerate(words):
            for pair in pairwise(word):
                counts[pair] += weights[index]
                homes[pair].add(index)
        merges: list[Pair] = []
        while len(merges) < size - BYTES:
            most = max(counts.values(), default=0)
            if most < 2:
                break
            best = min(pair for pair, count in counts.items() if count == most)
            for index in homes[best]:
                old, new = words[index], _merge(words[index], best, BYTES + len(merges))
                for pair in pairwise(old):
                    counts[pair] -= weights[index]
                for pair in pairwise(new):
                    counts[pair] += weights[index]
                    homes[pair].add(index)
                words[index] = new
            del counts[best], homes[best]
            merges.append(best)
        return cls(tuple(merges))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return BYTES + len(self.merges)

    def encode(self, text: str) -> Tensor:
        """The tokens of any text: (n,) int64."""
        ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        words = _WORD.findall(text)
        known = {word: _encode_word(word, ranks) for word in set(words)}
        return torch.tensor([t for word in words for t in known[word]], dtype=torch.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        pieces = [bytes([byte]) for byte in range(BYTES)]
        for first, second in self.merges:
            pieces.append(pieces[first] + pieces[second])
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")


def _encode_word(word: str, ranks: dict[Pair, int]) -> list[int]:
    """Merge the pairs of a word in the order in which they were learned."""
    tokens = list(word.encode())
    while pairs := [pair for pair in pairwise(tokens) if pair in ranks]:
        first = min(pairs, key=ranks.__getitem__)
        tokens = _merge(tokens, first, BYTES + ranks[first])
    return tokens


def _merge(tokens: list[int], pair: Pair, merged: int) -> list[int]:
    """`tokens` with every occurrence of `pair`, from the left, as the one token `merged`."""
    out: list[int] = []
    for token in tokens:
        if out and (out[-1], token) == pair:
            out[-1] = merged
        else:
            out.append(token)
    return out


def _codes(text: str) -> Tensor:
    """The code points of a text: (n,) int64."""
    if not text:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(text, "utf-32-le"), dtype=torch.int32).long()
