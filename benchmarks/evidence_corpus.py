"""The texts of `evidence.py` as tokens: a small file that travels to where the runs are.

    python benchmarks/evidence_corpus.py --source eltec-eng --vocabulary 4096 novels.pt
    python benchmarks/evidence_corpus.py --source site-packages/torch --vocabulary 8192 programs.pt
    python benchmarks/evidence_corpus.py --source input.txt --tokens-of novels.pt plays.pt

Byte pairs are learned from the text that is trained on, `gpt.BytePairs`, or taken from
another file. What is held out: `val.txt.xz` of a folder with `train_*.txt.xz`; of any other folder
every 25th of its Python files; of one file its last tenth.
"""

import argparse
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpt import BytePairs, fingerprint
from nucleon._files import replacing

LIMIT = 12_000_000
"""Tokens to train on that are kept: two bytes each."""
HELD_OUT_LIMIT = 500_000
LEARNED_FROM = 4_000_000
"""Characters that byte pairs are learned from, spread evenly over the text."""
PIECES = 64
EVERY = 25
"""One of so many files of a folder is held out."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on, tokens to judge by, and what they are made with."""

    tokens: Tensor
    """(n,) int16."""
    held_out: Tensor
    merges: tuple[tuple[int, int], ...]

    @property
    def vocabulary(self) -> int:
        """Number of different tokens."""
        return BytePairs(self.merges).size

    @property
    def fingerprint(self) -> str:
        """The first digits of a hash of the tokens."""
        return fingerprint(self.tokens, self.held_out)


def load(path: Path) -> Corpus:
    """What `save` wrote."""
    found = torch.load(path, weights_only=True)
    return Corpus(found["tokens"], found["held_out"], tuple(map(tuple, found["merges"])))


def save(corpus: Corpus, path: Path) -> None:
    """Write it whole or not at all."""
    content = {
        "tokens": corpus.tokens,
        "held_out": corpus.held_out,
        "merges": [list(pair) for pair in corpus.merges],
    }
    with replacing(path) as temporary:
        torch.save(content, temporary)


def prepare(source: Path, vocabulary: int, tokenizer: BytePairs | None = None) -> Corpus:
    """The tokens of a text; see above for what is held out.

    Args:
        source: a file, or a folder.
        vocabulary: number of tokens to learn.
        tokenizer: to take instead of learning one (None).
    """
    train, held_out = texts(source)
    if tokenizer is None:
        tokenizer = BytePairs.learn(sample(train), vocabulary)
    tokens, judged = encode(tokenizer, train, LIMIT), encode(tokenizer, held_out, HELD_OUT_LIMIT)
    return Corpus(tokens, judged, tokenizer.merges)


def texts(source: Path) -> tuple[str, str]:
    """What to train on, and what is held out."""
    if source.is_file():
        whole = source.read_text("utf-8")
        cut = len(whole) - len(whole) // 10
        return whole[:cut], whole[cut:]
    if packed := sorted(source.glob("train_*.txt.xz")):
        return "".join(map(unpacked, packed)), unpacked(source / "val.txt.xz")
    files = sorted(source.rglob("*.py"))
    if len(files) < EVERY:
        raise ValueError(f"source has {len(files)} Python files, {source}; give a larger folder")
    held_out = files[EVERY - 1 :: EVERY]
    train = [file for file in files if file not in set(held_out)]
    return "".join(map(read, train)), "".join(map(read, held_out))


def unpacked(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def read(path: Path) -> str:
    return path.read_text("utf-8", errors="replace")


def sample(text: str) -> str:
    """Pieces of a text, evenly spread, of `LEARNED_FROM` characters together."""
    length = LEARNED_FROM // PIECES
    starts = range(0, max(1, len(text) - length), max(1, len(text) // PIECES))
    return "".join(text[start : start + length] for start in starts)


def encode(tokenizer: BytePairs, text: str, limit: int) -> Tensor:
    """The first `limit` tokens of a text: (n,) int16."""
    pieces, count = list[Tensor](), 0
    for piece in lines(text):
        pieces.append(tokenizer.encode(piece).to(torch.int16))
        count += len(pieces[-1])
        if count >= limit:
            break
    return torch.cat(pieces)[:limit].clone()  # what is cut off is not saved


def lines(text: str, about: int = 10_000_000) -> Iterator[str]:
    """A text in pieces of about so many characters, which end where a line does."""
    start = 0
    while start < len(text):
        end = text.find("\n", min(start + about, len(text) - 1)) + 1 or len(text)
        yield text[start:end]
        start = end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--source", type=Path, required=True, help="a file, or a folder")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens-of", type=Path, help="a file whose tokens to use")
    chosen = parser.parse_args()
    tokenizer = BytePairs(load(chosen.tokens_of).merges) if chosen.tokens_of else None
    corpus = prepare(chosen.source, chosen.vocabulary, tokenizer)
    save(corpus, chosen.output)
    print(
        f"{chosen.output}: {len(corpus.tokens):,} tokens to train on, "
        f"{len(corpus.held_out):,} held out, vocabulary {corpus.vocabulary:,}, "
        f"hash {corpus.fingerprint}"
    )


if __name__ == "__main__":
    main()
