"""Weights that contain several maps, such as q, k and v.

A weight is cut into its maps only if the class of its parent is in `KNOWN`, since libraries use one
name for different layouts. Others that contain several maps by their name are one matrix, with a
warning that lists the layouts which their name and shape allow.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from nucleon.optim.matrices import axes

Layout = str | Callable[[Any, int, int], str]
"""The word of the output axis, see `optim.matrices.axes`, or (parent, rows, columns) → that word.
Names of two letters and more in a word are numbers of the parent or its config."""


def known(parent: nn.Module | None, name: str, rows: int, columns: int) -> tuple[str, str] | None:
    """Return the word of the output axis of `parent.name`, and its maps; None if not in `KNOWN`."""
    for package, file, base in bases(parent):
        table, kind = KNOWN.get(package, {}), f"{base}.{name}"
        if entry := table.get(f"{file}.{kind}") or table.get(kind):
            layout, maps = entry
            word = _word(layout, parent, rows, columns)
            return None if word is None else (word, maps)  # another version of the class
    return None


def unknown(parent: nn.Module | None, name: str, rows: int, columns: int) -> dict[str, str] | None:
    """Return the layouts of `parent.name` that its name and shape allow; None for a single map.

    They are {meaning: word of the output axis}.
    """
    if rows == getattr(parent, "head_dim", None):  # one head whose keys are its values
        return None
    layouts: Sequence[tuple[str, Layout]] | None = _maps(name)
    if name in ("in_proj", "x_proj") and any(hasattr(parent, x) for x in ("dt_proj", "A_log")):
        second = getattr(getattr(parent, "A_log", None), "ndim", 0) == 1
        version = 2 if second and not hasattr(parent, "dt_proj") else 1
        layouts = _MAMBA.get((name, version), ())
    elif _MODULATION.search(type(parent).__name__) or _MODULATION.search(name):
        if rows % columns or not 2 <= rows // columns <= 9:
            return None
        layouts = [("shifts, scales and gates one after the other", _as_wide)]
    if layouts is None:
        return None
    words: dict[str, str] = {}
    for meaning, layout in layouts:
        if (word := _word(layout, parent, rows, columns)) is not None:
            words.setdefault(meaning, word)
    return words


def named(name: str) -> bool:
    """Return True if the name of a module indicates several maps."""
    return _maps(name) is not None or _MODULATION.search(name) is not None


def _maps(name: str) -> Sequence[tuple[str, Layout]] | None:
    matched = (x for names, x in NAMED.items() if re.search(names, name, re.IGNORECASE))
    return next(matched, None)


def _word(layout: Layout, parent: Any, rows: int, columns: int) -> str | None:
    """Return the word of a layout with its numbers; None if it does not fit the weight."""
    try:
        if isinstance(layout, str):
            word = re.sub(r"[a-z_]{2,}", lambda name: str(number(parent, name[0])), layout)
        else:
            word = layout(parent, rows, columns)
        word = simplified(word)
        axes.parse(f"{word} c", (rows, columns))
    except (AttributeError, TypeError, ValueError):
        return None
    return word


def experts(module: nn.Module, name: str) -> tuple[str, str] | None:
    """Return the axes of a stack of experts, and its maps; None if no library defines the class."""
    for package, _, base in bases(module):
        if package not in EXPERTS or not base.endswith("Experts"):
            continue
        spec, word = EXPERTS[package].get(base, ("b {} c", "(b=2 r)"))
        order, outer, inner = ("(in, out)", 2, 1) if spec == "b c {}" else ("(out, in)", 1, 2)
        both: Any = getattr(module, "gate_up_proj", None)
        down: Any = getattr(module, "down_proj", None)
        stacks = all(isinstance(each, Tensor) and each.ndim == 3 for each in (both, down))
        if stacks and both.shape[outer] != 2 * down.shape[inner]:
            return None  # another version of the class
        gated = name in _GATED_STACKS and getattr(module, "has_gate", True)
        maps = "experts: gate, up" if gated else "experts"
        return spec.format(word if gated else "r"), f"{maps}, each {order}"
    return None


def bases(module: nn.Module | None) -> Iterator[tuple[str, str, str]]:
    """Yield package, file and name of the class of a module, and of those it derives from."""
    for base in type(module).__mro__:
        package, _, path = base.__module__.partition(".")
        yield package, path.rpartition(".")[2], base.__name__


def is_known(module: nn.Module) -> bool:
    """Return True if the class of a module, or one it derives from, is of a library in `KNOWN`."""
    return any(package in KNOWN for package, _, _ in bases(module))


# ------------------------------------------------------------------------------------- layouts

_ALIASES = {
    "heads": ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
}


def number(parent: Any, name: str) -> Any:
    """Return the number of this name, or of an alias, that a module or its config has, or None."""
    for holder in (parent, getattr(parent, "config", None)):
        for alias in _ALIASES.get(name, (name,)):
            if isinstance(value := getattr(holder, alias, None), int):
                return value
    return None


def sections(*sizes: int) -> str:
    """Return the word of maps of these sizes one after the other."""
    return f"r{{{','.join(map(str, sizes))}}}"


def simplified(word: str) -> str:
    """Return a word with repeated sections of equal size written as a batch."""
    equal = re.fullmatch(r"\((r(=\d+)?) r\{(\d+)((?:,\3)+)\}\)", word)
    if equal is None:
        return word
    count, size = equal[4].count(",") + 1, "" if equal[2] else f"={equal[3]}"
    return f"({equal[1]} b={count} r{size})"


def _as_wide(parent: Any, rows: int, columns: int) -> str:
    """Return square maps one after the other: three, or two in cross-attention."""
    return f"(b={rows // columns} r)"


def _grouped(parent: Any, rows: int, columns: int) -> str:
    """Return q, k, v one after the other, with fewer heads in k and v."""
    size = number(parent, "kv_heads") * parent.head_dim
    return sections(rows - 2 * size, size, size)


def _of_falcon(parent: Any, rows: int, columns: int) -> str:
    """Return (kv heads, queries per kv head + 2, head dim) for the new decoder, or as BigCode."""
    if not parent.new_decoder_architecture:
        return _of_big_code(parent, rows, columns)
    size = parent.head_dim
    queries = number(parent, "heads") // number(parent, "kv_heads") * size
    return f"(r {sections(queries, size, size)})"


def _of_big_code(parent: Any, rows: int, columns: int) -> str:
    if getattr(parent, "is_cross_attention", False):
        return "(b=2 r)"
    if not parent.multi_query:
        return f"(r={number(parent, 'heads')} b=3 r)"
    return sections(rows - 2 * parent.head_dim, parent.head_dim, parent.head_dim)


def _of_mamba2(parent: Any, rows: int, columns: int) -> str:
    inner, state = parent.intermediate_size, parent.n_groups * parent.ssm_state_size
    return sections(inner, inner, state, state, parent.num_heads)


def _of_qwen3_next(parent: Any, rows: int, columns: int) -> str:
    """Return (k heads, 2 + 2·v heads per k head, head dim): q, k, values, gates."""
    key = parent.head_k_dim
    value = parent.num_v_heads // parent.num_k_heads * parent.head_v_dim
    return f"(r {sections(key, key, value, value)})"


def _of_torchtitan(parent: Any, rows: int, columns: int) -> str:
    size = parent.head_dim
    return f"(r {sections(parent.heads_per_kv * size, size, size)})"


# ------------------------------------------------------------------- names in unknown classes

_MODULATION = re.compile(r"ada_?(ptive_?)?(ln|layer_?norm|rms_?norm)", re.IGNORECASE)
"""Layers that make the shifts, scales and gates of a norm from a condition, as in DiT."""


def _fewer(parent: Any, rows: int, columns: int) -> str:
    """Return q as wide as the input, then fewer k and v."""
    pair = (rows - columns) // 2
    return sections(columns, pair, pair) if columns < rows < 3 * columns else ""


def _of_x_proj(parent: Any, rows: int, columns: int) -> str:
    step = parent.dt_proj.in_features
    return sections(step, (rows - step) // 2, (rows - step) // 2)


def _of_in_proj(parent: Any, rows: int, columns: int) -> str:
    inner, heads = parent.out_proj.in_features, len(parent.A_log)
    state = (rows - 2 * inner - heads) // 2
    return sections(inner, inner, state, state, heads)


_MAMBA: Mapping[tuple[str, int], Sequence[tuple[str, Layout]]] = {
    ("x_proj", 1): [("dt, B, C", _of_x_proj)],
    ("in_proj", 1): [("x and z one after the other", "(b=2 r)")],
    ("in_proj", 2): [("z, x, B, C, dt", _of_in_proj)],
}
"""Layouts of the projections of a state space, by name and version of Mamba."""

NAMED: Mapping[str, Sequence[tuple[str, Layout]]] = {
    r"qkv|query_key_value|queries_keys_values|w_pack|c_attn": [
        ("q, k, v one after the other, as chunk cuts them", "(b=3 r)"),
        ("q as wide as the input, then fewer k and v", _fewer),
        ("head by head, in each q, k, v", "(r=heads b=3 r)"),
    ],
    r"gate_up|^w1[23]$": [
        ("gate and up one after the other, as chunk cuts them", "(b=2 r)"),
        ("gate and up row by row in turn, as x[..., ::2] takes one", "(r b=2)"),
    ],
    r"^(to_|linear_|w)?qk(_b)?(_proj|_linear|_points)?$": [
        ("q, k one after the other, as chunk cuts them", "(b=2 r)"),
        ("head by head, in each q, k", "(r r{qk_nope_head_dim,v_head_dim})"),
        ("head by head, in each q, k", "(r=heads b=2 r)"),
    ],
    r"^(to_|linear_|w)?kv(_b)?(_proj|_linear|_points)?$|keys_values": [
        ("k, v one after the other, as chunk cuts them", "(b=2 r)"),
        ("head by head, in each k, v", "(r r{qk_nope_head_dim,v_head_dim})"),
        ("head by head, in each k, v", "(r=kv_heads b=2 r)"),
        ("head by head, in each k, v", "(r=heads b=2 r)"),
    ],
    r"^kv_a_proj_with_mqa$": [("latents, then rotary keys", "r{kv_lora_rank,qk_rope_head_dim}")],
}
"""Meanings and layouts by the name of a weight; the first name that matches, the first layout of a
meaning that fits."""

# ---------------------------------------------------------------------------- the known classes

_Table = dict[str, tuple[Layout, str]]


def _table(*entries: tuple[Layout, str, str, str]) -> _Table:
    """Return {class.name: (layout, maps)} of entries (layout, maps, name, classes)."""
    return {
        f"{kind}.{name}": (layout, maps)
        for layout, maps, name, classes in entries
        for kind in classes.split()
    }


_QKV, _KV, _GATED = "q, k, v", "k, v", "gate, up"
_LATENT_KV = "k, v in each head"
_LATENT = (
    "AXK1Attention AXK2Attention BailingHybridAttention DeepseekV2Attention DeepseekV3Attention "
    "DeepseekV32Attention Dots3NoteTextAttention Glm4MoeLiteAttention GlmMoeDsaAttention "
    "HYV4Attention KimiLinearAttention LongcatFlashMLA MiniCPM3Attention Mistral4Attention "
    "MistralLarge4TextAttention YoutuAttention"
)
"""Attentions whose keys and values come from one latent vector of a token."""

KNOWN: Mapping[str, _Table] = {
    "transformers": _table(
        (_as_wide, _QKV, "c_attn", "GPT2Attention DecisionTransformerGPT2Attention"),
        (_as_wide, _QKV, "c_attn", "ImageGPTAttention modeling_openai.Attention"),
        (_of_big_code, _QKV, "c_attn", "GPTBigCodeAttention"),
        ("(b=3 r)", _QKV, "att_proj", "BarkSelfAttention"),
        ("(b=3 r)", _QKV, "qkv_linear", "LayoutLMv2SelfAttention"),
        ("(b=3 r)", _QKV, "Wqkv", "ModernBertAttention MptAttention"),
        (_grouped, _QKV, "Wqkv", "DbrxAttention"),
        (_grouped, _QKV, "qkv_proj", "Phi3Attention Phi4MultimodalAttention"),
        (_grouped, _QKV, "qkv", "Exaone4_5_VisionAttention"),
        ("(r=heads b=3 r)", _QKV, "qkv_proj", "MiniMaxLightningAttention"),
        ("(r=4 b=3 r)", "q, v, k, in four parts", "qkv_proj", "CodeGenAttention"),
        ("(r=heads b=3 r)", _QKV, "query_key_value", "BloomAttention PersimmonAttention"),
        ("(r=heads b=3 r)", _QKV, "query_key_value", "GPTNeoXAttention GPTNeoXJapaneseAttention"),
        (_of_falcon, _QKV, "query_key_value", "FalconAttention"),
        ("(r=heads b=3 r)", _QKV, "in_proj", "modeling_deberta.DisentangledSelfAttention"),
        ("r{key_dim,key_dim,value_dim}", _QKV, "in_proj_qkv",
         "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen4ExpTextGatedDeltaNet"),
        ("(r=heads b=2 r)", "q, gates", "q_proj",
         "Qwen3NextAttention Qwen3_5Attention Qwen3_5MoeAttention Qwen4ExpTextAttention"),
        (_of_qwen3_next, "q, k, values, gates", "in_proj_qkvz", "Qwen3NextGatedDeltaNet"),
        ("(r=num_k_heads b=2 r)", "b, a", "in_proj_ba", "Qwen3NextGatedDeltaNet"),
        ("(b=3 r)", _QKV, "qkv",
         "BlipAttention Blip2Attention InstructBlipAttention InstructBlipVideoAttention "
         "CohereCompassVisionAttention DeepseekOcr2SamVisionAttention Dots3NoteVisionAttention "
         "Ernie4_5_VLMoeVisionAttention Florence2VisionChannelAttention "
         "Florence2VisionWindowAttention Glm4vVisionAttention Glm4vMoeVisionAttention "
         "Glm5NextVisionAttention GlmImageVisionAttention GlmOcrVisionAttention "
         "GotOcr2VisionAttention HieraMaskUnitAttention MgpstrAttention "
         "PPFormulaNetVisionAttention PPOCRV5MobileRecAttention PPOCRV5ServerRecAttention "
         "PPOCRV6SmallRecAttention modeling_qwen2_vl.VisionAttention Qwen2_5_VLVisionAttention "
         "Qwen3VLVisionAttention Qwen3VLMoeVisionAttention Qwen3OmniMoeVisionAttention "
         "Qwen3_5VisionAttention Qwen3_5MoeVisionAttention Qwen4ExpVisionAttention "
         "SamVisionAttention Sam2MultiScaleAttention SamHQVisionAttention SegGptAttention "
         "SLANeXtVisionAttention TimesformerSelfAttention UnlimitedOcrSamVisionAttention "
         "VitDetAttention"),
        ("(b=2 r)", _KV, "to_kv",
         "EvollaSequenceCompressorAttention GraniteSpeechConformerAttention "
         "GraniteSpeechPlusConformerAttention"),
        ("(b=2 r)", _KV, "kv_proj", "JetMoeAttention"),
        ("(r r{qk_nope_head_dim,v_head_dim})", _LATENT_KV, "kv_b_proj",
         f"{_LATENT} Glm5NextTextAttention"),
        ("r{kv_lora_rank,qk_rope_head_dim}", "latents, k", "kv_a_proj_with_mqa",
         _LATENT),
        ("(b=2 r)", _GATED, "gate_up_proj",
         "DiaMLP Dots3NoteAudioMLP EsmFold2SwiGLU GlmMLP Glm4MLP Glm4vTextMLP GlmImageTextMLP "
         "GlmOcrTextMLP MiniMaxM3VLDenseMLP Phi3MLP Phi4MultimodalMLP Phi4MultimodalAudioMLP "
         "Zamba2MLP"),
        ("(b=2 r)", _GATED, "Wi", "ModernBertMLP ModernBertDecoderMLP"),
        ("(b=2 r)", _GATED, "fc1",
         "KyutaiSpeechToTextGatingMLP MoshiGatingMLP MoonshineDecoderMLP "
         "MoonshineStreamingDecoderMLP"),
        ("(b=2 r)", _GATED, "input_linear",
         "GraniteMoeSWAMLP GraniteMoeHybridMLP GraniteMoeSharedMLP"),
        ("(b=2 r)", "up, gate", "proj", "ClvpGatedLinearUnit"),
        ("(b=2 r)", "x, gates", "pointwise_conv1",
         "FastSpeech2ConformerConvolutionModule LasrEncoderConvolutionModule "
         "NemotronAsrStreamingEncoderConvolutionModule ParakeetEncoderConvolutionModule "
         "SeamlessM4TConformerConvolutionModule SeamlessM4Tv2ConformerConvolutionModule "
         "Wav2Vec2BertConvolutionModule Wav2Vec2ConformerConvolutionModule"),
        ("(b=2 r)", "x, gates", "up_conv",
         "GraniteSpeechConformerConvModule GraniteSpeechPlusConformerConvModule"),
        ("(b=2 r)", "gates of two inputs", "gate", "DFineGate Deimv2Gate"),
        ("(b=2 r)", "q, k", "dense", "PPDocLayoutV2GlobalPointer PPDocLayoutV3GlobalPointer"),
        ("(r=heads b=3 r)", _QKV, "proj", "EsmFoldSelfAttention"),
        ("(b=2 r)", "x, z", "in_proj", "MambaMixer FalconMambaMixer JambaMambaMixer"),
        ("(r b=2)", "x, z, row by row", "in_proj", "ZambaMambaMixer"),
        ("r{time_step_rank,ssm_state_size,ssm_state_size}", "dt, B, C", "x_proj",
         "MambaMixer FalconMambaMixer JambaMambaMixer"),
        (_of_mamba2, "z, x, B, C, dt", "in_proj",
         "Mamba2Mixer BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer NemotronHMamba2Mixer "
         "Zamba2MambaMixer"),
        ("(b=3 r)", "B, C, x", "in_proj",
         "Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv Lfm3VlVisionShortConv"),
        (lambda p, m, n: sections(n, n, m - 2 * n), "q, context, gates", "projection_in",
         "FocalNetModulation"),
        ("r{1,embed_dim,embed_dim}", "scores, k, v", "qkv_proj", "MobileViTV2LinearSelfAttention"),
    ),
    "timm": _table(
        ("(b=3 r)", _QKV, "qkv",
         "attention.Attention vision_transformer.Attention beit.Attention fastvit.Attention "
         "metaformer.Attention nest.Attention visformer.Attention volo.Attention "
         "vision_transformer_sam.Attention AttentionRope DiffAttention RotAttentionPool2d "
         "AttentionPool2d TalkingHeadAttn FactorAttnConvRelPosEnc MHSA ChannelAttention "
         "ChannelAttentionV2 WindowAttention WindowMultiHeadAttention CrossCovarianceAttn "
         "EvaAttention MaskUnitAttention MultiScaleAttention LocallyGroupedAttn RelPosAttention "
         "XCA"),
        (_as_wide, _QKV, "qkv", "WindowAttentionGlobal"),
        (lambda p, m, n: f"(r={p.num_heads} b=3 r)" if p.head_first else "(b=3 r)", _QKV, "qkv",
         "Attention2d AttentionCl"),
        ("(r=heads r{key_dim,key_dim,val_dim})", _QKV, "qkv",
         "tiny_vit.Attention levit.Attention efficientformer.Attention"),
        ("(r=heads r{key_dim,val_dim})", _KV, "kv", "AttentionDownsample"),
        ("r{qk_dim,qk_dim,pdim}", _QKV, "qkv", "SHSA"),
        ("r{1,embed_dim,embed_dim}", "scores, k, v", "qkv_proj", "mobilevit.LinearSelfAttention"),
        ("r{dim_out_qk,dim_out_qk,dim_out_v}", _QKV, "qkv", "BottleneckAttn"),
        ("(b=2 r)", _KV, "kv",
         "AttentionPoolLatent pvt_v2.Attention GlobalSubSampleAttn volo.ClassAttention"),
        (lambda p, m, n: sections(*p.in_split), "mlp, q, k, v", "in_proj",
         "ParallelScalingBlock DiffParallelScalingBlock"),
        ("(b=2 r)", _GATED, "fc1", "GluMlp"),
    ),
    "torchvision": _table(
        ("(b=3 r)", _QKV, "qkv",
         "ShiftedWindowAttention ShiftedWindowAttentionV2 MultiscaleAttention"),
    ),
    "torchtitan": _table(
        (_of_torchtitan, _QKV, "wqkv", "FusedQKVLinear"),
        ("(b=3 r)", _QKV, "qkv", "layers.SelfAttention"),
        (lambda p, m, n: sections(n, n, n, m - 3 * n), "q, k, v, mlp", "linear1",
         "SingleStreamBlock"),
        ("(r r{qk_nope_head_dim,v_head_dim})", _LATENT_KV, "wkv_b", "model.Attention"),
        ("r{kv_lora_rank,qk_rope_head_dim}", "latents, k", "wkv_a", "model.Attention"),
    ),
}  # fmt: skip
"""Layouts by package; a class name that occurs twice in its package is preceded by its file."""

EXPERTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "transformers": {
        "AriaExperts": ("b c {}", "(b=2 r)"),
        "GptOssExperts": ("b c {}", "(r b=2)"),
        "Llama4TextExperts": ("b c {}", "(b=2 r)"),
        "OpenAIPrivacyFilterExperts": ("b c {}", "(b=2 r)"),
    },
    "torchtitan": {"GptOssGroupedExperts": ("b {} c", "(r b=2)")},
}
"""Axes of stacks of experts by package, and the word of a stack of gate and up.

Other classes of these packages whose name ends with Experts have ("b {} c", "(b=2 r)").
"""
_GATED_STACKS = ("gate_up_proj", "mlp1_weight_EGD")
