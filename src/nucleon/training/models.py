"""The networks of `nucleon train`: a GPT, and a perceptron for small images.

Both are plain modules: they compile, and `DistributedDataParallel` and `fully_shard` take them as
they are. Every weight of an attention or a perceptron is a matrix of its own.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812, as everyone writes it
from torch import Tensor, nn

from nucleon import _checks

BASE = 10_000.0  # of the rotary frequencies, Su et al. 2021


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Args:
        vocabulary: number of tokens.
        context: the longest sequence (128).
        layers: number of blocks (4).
        heads: of each attention, a divisor of `width` (4).
        width: of the residual stream (128).
        dropout: probability to drop an entry of what a block adds (0).
        tied: the head is the embedding, transposed (False).
    """

    vocabulary: int
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "layers", "heads", "width"):
            _checks.count(name, getattr(self, name))
        _checks.fraction("dropout", self.dropout, closed="0")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2·heads = {2 * self.heads}, got {self.width}: "
                f"rotary positions turn the entries of a head in pairs"
            )


class GPT(nn.Module):
    """Tokens (b, t) → logits (b, t, vocabulary): pre-norm blocks with rotary positions.

        x ← x + attention(norm x),   x ← x + perceptron(norm x),   logits = head(norm x)

    Linear weights begin as N(0, 1/columns), those that write to the residual stream divided by
    √(2·layers), the embedding and the head as N(0, 0.02²).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.reset_parameters()
        if config.tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """Draw the weights anew from torch's generator."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                deviation = module.in_features**-0.5
                if name.endswith((".output", ".down")):
                    deviation /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(module.weight, std=deviation)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each one."""
        length = tokens.shape[-1]
        if length > self.config.context:
            raise ValueError(
                f"tokens has {length} columns, more than the context {self.config.context}; "
                f"cut it, or make the GPT with a longer context"
            )
        x = self.embedding(tokens)  # (b, t, width)
        rotation = _rotation(length, self.config.width // self.config.heads, x)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


class Block(nn.Module):
    """x + attention(norm x), then x + perceptron(norm x)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.perceptron_norm = nn.RMSNorm(config.width)
        self.perceptron = Perceptron(config.width, 4 * config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(b, t, width) → (b, t, width)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation))
        return x + self.dropout(self.perceptron(self.perceptron_norm(x)))


class Attention(nn.Module):
    """Causal attention; queries and keys are normalized, then rotated by their position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """(b, t, width) → (b, t, width)."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, heads, t, width/heads)
            for project in (self.query, self.key, self.value)
        )
        q, k = (_rotate(F.rms_norm(y, (y.shape[-1],)), rotation) for y in (q, k))
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


class MLP(nn.Module):
    """Features (b, inputs) → logits (b, classes): ReLU layers of equal width, and a linear head.

    Args:
        inputs: number of features (64, those of an 8×8 image).
        classes: number of logits (10).
        width: of the hidden layers (64).
        layers: number of hidden layers (2).
    """

    def __init__(
        self, inputs: int = 64, classes: int = 10, *, width: int = 64, layers: int = 2
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("layers", layers)):
            _checks.count(name, value)
        sizes = (inputs, *[width] * layers)
        self.hidden = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the classes."""
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.head(x)


def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the model's logits in nats, float32 at least."""
    logits = cast(Tensor, model(inputs))
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _rotation(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The cos and sin (length, width/2) of position·BASE^(−2i/width), i = 0, …, width/2 − 1.

    Made anew in each call: a buffer would have to be remade after materializing from `meta`.
    """
    exponent = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
    position = torch.arange(length, device=like.device, dtype=torch.float32)
    angle = position[:, None] * BASE**-exponent  # (length, width/2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x_i, x_{i + width/2}) by the angles of their position."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
