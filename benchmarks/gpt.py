"""The network and the tokens of the benchmarks: a small GPT on characters or byte pairs.

text = characters(read(path), context=64)
model = GPT(text.vocabulary, context=64, layers=2, heads=2, width=64)
loss(model, *text.batch(0, 16, seed=0)).backward()
"""

import math
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812, as everyone writes it
from torch import Tensor, nn

from nucleon import noise

Batch = tuple[Tensor, Tensor]
"""Inputs, and the same one token later."""
Pair = tuple[int, int]

HELD_OUT = 0.1
"""Share of a text that is held out, its end."""
JUDGED = 64
"""Windows of held-out text in an evaluation, spread evenly over it."""
BYTES = 256
WINDOWS = 1  # the stream of the noise that places are drawn from
# A word with its leading space, a run of signs likewise, or white space: together, all of a text.
WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")


class GPT(nn.Module):
    """Tokens (b, t) → logits (b, t, vocabulary): pre-norm blocks with rotary positions.

        x ← x + attention(norm x),   x ← x + perceptron(norm x),   logits = head(norm x)

    Linear weights begin as N(0, 1/columns), those that write to the residual stream divided by
    √(2·layers), the embedding and the head as N(0, 0.02²).

    Args:
        vocabulary: number of tokens.
        context: the longest sequence.
        layers: number of blocks.
        heads: of each attention; `width` is a multiple of 2·heads.
        width: of the residual stream.
    """

    def __init__(
        self, vocabulary: int, *, context: int, layers: int, heads: int, width: int
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                deviation = module.in_features**-0.5
                if name.endswith((".output", ".down")):
                    deviation /= math.sqrt(2 * layers)
                nn.init.normal_(module.weight, std=deviation)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each one."""
        x = self.embedding(tokens)  # (b, t, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """x + attention(norm x), then x + perceptron(norm x)."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(heads, width)
        self.perceptron_norm = nn.RMSNorm(width)
        self.perceptron = Perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, width) → (b, t, width)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))


class Attention(nn.Module):
    """Causal attention; queries and keys are normalized, then rotated by their position."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, width) → (b, t, width)."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, heads, t, width/heads)
            for project in (self.query, self.key, self.value)
        )
        q, k = (rotated(F.rms_norm(y, (y.shape[-1],))) for y in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Perceptron(nn.Module):
    """x → down(gelu(up x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, width) → (…, width)."""
        return self.down(F.gelu(self.up(x)))


def rotated(x: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + d/2}) of (…, t, d) by position·10⁴^(−2i/d), Su et al. 2021."""
    length, width = x.shape[-2:]
    exponent = torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width
    position = torch.arange(length, device=x.device, dtype=torch.float32)
    angle = position[:, None] * 10_000.0**-exponent  # (t, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the model's logits in nats, float32 at least."""
    return F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens, and windows of `context` + 1 of them.

    Args:
        tokens: (n,) integers to train on.
        held_out: (k,) integers to judge by.
        vocabulary: number of different tokens.
        context: length of the inputs.
    """

    tokens: Tensor
    held_out: Tensor
    vocabulary: int
    context: int

    def batch(self, index: int, size: int, *, seed: int) -> Batch:
        """Return `size` windows at places drawn from (seed, index)."""
        places = noise.uniform((size,), seed=seed, stream=WINDOWS, step=index, dtype=torch.float64)
        last = len(self.tokens) - self.context  # ceil maps (0, 1] onto 1, …, last
        return self.windows(self.tokens, (places * last).ceil().long() - 1)

    def judged(self, size: int, windows: int = JUDGED) -> Iterator[Batch]:
        """Return up to `windows` of the held-out text that do not overlap, in batches of `size`."""
        last = len(self.held_out) - self.context - 1
        count = min(windows, last // self.context + 1)
        starts = torch.linspace(0, last, count, dtype=torch.float64).long().to(self.held_out.device)
        return (self.windows(self.held_out, some) for some in starts.split(size))

    def windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        """Return the windows that begin at `starts`."""
        offsets = torch.arange(self.context + 1, device=starts.device)
        windows = tokens[starts[:, None] + offsets].long()
        return windows[:, :-1], windows[:, 1:]


def read(place: Path | None = None, limit: int = 1_000_000) -> str:
    """Return the first `limit` bytes of a text file, or of the files of a folder by their path.

    Without a place, of the sources of Python's standard library, which every machine has.
    """
    folder = Path(sysconfig.get_path("stdlib")) if place is None else place
    skipped = {"__pycache__", "site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [folder]
    if folder.is_dir():
        files = sorted(p for p in folder.rglob("*.py" if place is None else "*") if p.is_file())
        files = [f for f in files if not skipped & {*f.relative_to(folder).parts[:-1]}]
    content = b""
    for file in files:
        content += file.read_bytes()[: limit - len(content)]
        if len(content) >= limit:
            break
    return content.decode(errors="replace")


def characters(content: str, *, context: int, held_out: str | None = None) -> Text:
    """Return a text with one token a character, in the order of Unicode.

    Args:
        content: the text.
        context: length of the inputs.
        held_out: text to judge by (None: the end of `content`).
    """
    whole = content + (held_out or "")
    codes = torch.frombuffer(bytearray(whole.encode("utf-32-le")), dtype=torch.int32)
    present = torch.bincount(codes) > 0
    tokens = (present.cumsum(0) - 1).to(torch.int16)[codes]
    cut = len(content) - (int(HELD_OUT * len(content)) if held_out is None else 0)
    return Text(tokens[:cut], tokens[cut:], int(present.sum()), context)


@dataclass(frozen=True)
class BytePairs:
    """One token a byte or a frequent sequence of bytes (Gage 1994; Sennrich et al. 2016).

    Args:
        merges: the pairs in the order in which they were learned; pair i is the token 256 + i.
    """

    merges: tuple[Pair, ...]

    @classmethod
    def learn(cls, text: str, size: int) -> "BytePairs":
        """Learn the `size` − 256 most frequent pairs, one after the other; none crosses a word.

        Among equally frequent pairs the smallest numbers win, so equal texts give equal tokens.
        """
        counted = Counter(WORD.findall(text))
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
                old, new = words[index], merged(words[index], best, BYTES + len(merges))
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
        """Return the number of tokens."""
        return BYTES + len(self.merges)

    def encode(self, text: str) -> Tensor:
        """Return the tokens of any text: (n,) int64."""
        ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        words = WORD.findall(text)
        known: dict[str, list[int]] = {}
        for word in set(words):
            tokens = list(word.encode())
            while pairs := [pair for pair in pairwise(tokens) if pair in ranks]:
                first = min(pairs, key=ranks.__getitem__)
                tokens = merged(tokens, first, BYTES + ranks[first])
            known[word] = tokens
        return torch.tensor([t for word in words for t in known[word]], dtype=torch.int64)


def merged(tokens: list[int], pair: Pair, number: int) -> list[int]:
    """Replace every occurrence of `pair`, from the left, by the one token `number`."""
    out: list[int] = []
    for token in tokens:
        if out and (out[-1], token) == pair:
            out[-1] = number
        else:
            out.append(token)
    return out
