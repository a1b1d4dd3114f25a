"""Networks that people train, with random weights and a random batch, for `models.py`.

The sizes are those of the published configurations, written out; transformers supplies the modules,
its hub is not asked. Each has tiny sizes beside them for a machine without an accelerator.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812, as everyone writes it
from torch import Tensor, nn

Sizes = Mapping[str, Any]
Batch = dict[str, Tensor]
CLASSES = 1000
RANK = 16
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Kind:
    """A network and what it is fed."""

    make: Callable[[Sizes], nn.Module]
    sizes: Sizes
    tiny: Sizes
    """The sizes that a tiny one has instead."""
    draw: Callable[[Sizes, int, int], Batch]
    """A batch of so many examples of such a length."""
    batch: tuple[int, int]
    unit: str
    """Name of an example, such as "sequences"."""
    cpu: int = 2
    """The most examples on a CPU: a whole batch of GPT-2 takes 20 GB."""


@dataclass(frozen=True)
class Network:
    """A model with a batch to train it on."""

    model: nn.Module
    batch: Batch
    described: str
    """The batch, in words."""

    def loss(self) -> Tensor:
        """Return the loss of the batch."""
        if isinstance(self.model, ResNet50):
            logits = self.model(self.batch["pixel_values"])
            return F.cross_entropy(logits.float(), self.batch["labels"])
        return self.model(**self.batch).loss


def build(
    name: str,
    device: torch.device,
    *,
    tiny: bool = False,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Network:
    """Return a network with its batch, drawn on its device.

    Args:
        name: one of `KINDS`.
        device: where.
        tiny: small sizes (False).
        dtype: of the weights (float32).
        channels_last: the layout of images and their kernels (False).
    """
    kind = KINDS[name]
    sizes = {**kind.sizes, **kind.tiny} if tiny else kind.sizes
    count, length = (2, kind.tiny["length"]) if tiny else kind.batch
    if device.type == "cpu":
        count = min(count, kind.cpu)
    torch.manual_seed(0)
    with device:
        model = kind.make(sizes).train().to(dtype)
        batch = kind.draw(sizes, count, length)
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
    if channels_last:
        layout: dict[str, Any] = {"memory_format": torch.channels_last}
        model = model.to(**layout)
        batch = {k: v.contiguous(**layout) if v.ndim == 4 else v for k, v in batch.items()}
    return Network(model, batch, f"{count} {kind.unit.format(length)}")


# ------------------------------------------------------------------ batches


def tokens(sizes: Sizes, count: int, length: int) -> Batch:
    """Return sequences, each to be continued."""
    drawn = torch.randint(sizes["vocab_size"], (count, length))
    return {"input_ids": drawn, "labels": drawn}


def images(sizes: Sizes, count: int, length: int) -> Batch:
    """Return square images in colour, and their classes."""
    pixels = torch.randn(count, 3, length, length)
    return {"pixel_values": pixels, "labels": torch.randint(sizes["classes"], (count,))}


def speech(sizes: Sizes, count: int, length: int) -> Batch:
    """Return spectrograms of the full length, and their words."""
    frames = 2 * sizes["max_source_positions"]  # the second convolution halves them
    heard = torch.randn(count, sizes["num_mel_bins"], frames)
    return {
        "input_features": heard,
        "labels": torch.randint(sizes["vocab_size"], (count, length)),
    }


# ------------------------------------------------------------------ modules


def from_transformers(name: str) -> Callable[[Sizes], nn.Module]:
    """Return a class of transformers with these sizes."""

    def make(sizes: Sizes) -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        options = {key: value for key, value in sizes.items() if key != "length"}
        if "classes" in options:
            options["num_labels"] = options.pop("classes")
        return cls(cls.config_class(**options))

    return make


class LoRA(nn.Module):
    """x → Wx + BAx with W frozen.

    Training begins at B = 0, where A has no gradient; B is drawn here, as it is after some steps.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return self.base(x) + self.lora_B(self.lora_A(x))


def adapted_llama(sizes: Sizes) -> nn.Module:
    """Return a Llama with trained factors of rank `RANK` beside its frozen linear layers."""
    model = from_transformers("LlamaForCausalLM")(sizes).requires_grad_(False)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if name in ADAPTED:
                setattr(module, name, LoRA(cast(nn.Linear, child)))
    return model


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with a shortcut; the 3×3 one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs, h, w) → (b, 4·width, h/stride, w/stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al. 2016, with the stride in the 3×3 convolutions; the standard sizes, or smaller."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inputs = sizes["width"], sizes["width"]
        self.stem = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks: list[nn.Module] = []
        for stage, depth in enumerate(sizes["depths"]):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, sizes["classes"])

    def forward(self, x: Tensor) -> Tensor:
        """Images (b, 3, h, w) → logits (b, classes)."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, padding=1)
        return self.fc(self.blocks(x).mean(dim=(2, 3)))


# ------------------------------------------------------------------ sizes

_GPT2 = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
_LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
# The layers of Qwen3-30B-A3B, four of them with a quarter of the experts: 10⁹ parameters.
_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "experts_implementation": "eager",  # grouped products want bfloat16 weights
}
_VIT_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "classes": CLASSES,
}
_WHISPER = {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "max_source_positions": 1500,
    "max_target_positions": 448,
}
_RESNET = {"width": 64, "depths": (3, 4, 6, 3), "classes": CLASSES}
_SMALL_GPT = {"vocab_size": 4096, "n_positions": 128, "n_embd": 256, "n_layer": 4, "n_head": 4}
_SMALL_CNN = {"width": 32, "depths": (2, 2, 2), "classes": 10}

_TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "length": 8,
}
_TINY_GPT2 = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 4}
_TINY_VIT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "classes": 5,
    "length": 8,
}
_TINY_WHISPER = {
    "vocab_size": 32,
    "num_mel_bins": 4,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_source_positions": 8,
    "max_target_positions": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "length": 8,
}

_TEXT = "sequences of {:,} tokens"
_IMAGES = "images of {0}×{0}"
_TINY_CNN = {"width": 4, "depths": (1, 1), "classes": 5, "length": 32}
_TINY_MOE = {**_TINY, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}

KINDS = {
    "gpt2": Kind(
        from_transformers("GPT2LMHeadModel"),
        _GPT2,
        {**_TINY_GPT2, "length": 8},
        tokens,
        (16, 1024),
        _TEXT,
    ),
    "llama-1b": Kind(
        from_transformers("LlamaForCausalLM"), _LLAMA_1B, _TINY, tokens, (4, 2048), _TEXT
    ),
    "qwen3-0.6b": Kind(
        from_transformers("Qwen3ForCausalLM"), _QWEN3, _TINY, tokens, (4, 2048), _TEXT
    ),
    "moe": Kind(
        from_transformers("Qwen3MoeForCausalLM"), _MOE, _TINY_MOE, tokens, (4, 2048), _TEXT
    ),
    "lora": Kind(adapted_llama, _LLAMA_1B, _TINY, tokens, (4, 2048), _TEXT),
    "vit-l": Kind(
        from_transformers("ViTForImageClassification"),
        _VIT_L,
        _TINY_VIT,
        images,
        (64, 224),
        _IMAGES,
    ),
    "whisper-small": Kind(
        from_transformers("WhisperForConditionalGeneration"),
        _WHISPER,
        _TINY_WHISPER,
        speech,
        (16, 448),
        "half minutes, {} tokens each",
    ),
    "resnet50": Kind(
        ResNet50,
        _RESNET,
        _TINY_CNN,
        images,
        (128, 224),
        _IMAGES,
    ),
    "small-gpt": Kind(
        from_transformers("GPT2LMHeadModel"),
        _SMALL_GPT,
        {**_TINY_GPT2, "length": 8},
        tokens,
        (16, 128),
        _TEXT,
        cpu=16,
    ),
    "small-cnn": Kind(ResNet50, _SMALL_CNN, _TINY_CNN, images, (64, 32), _IMAGES, cpu=64),
}
