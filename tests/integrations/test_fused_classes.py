"""Every class of transformers whose fused weights are cut: the cut is the one `forward` makes.

Queries twice as large with keys half as large leave an attention as it is, and without values
nothing comes out of it; a gate, or what it lets through, at zero leaves nothing of a gated map.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers

from nucleon.optim.matrices import axes
from nucleon.optim.routing import fused

WIDTH, HEADS, TOKENS = 64, 4, 8
WIDTHS = ("hidden_size", "embed_dim", "n_embd", "d_model")
COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
SIZES = {
    **dict.fromkeys(WIDTHS, WIDTH),
    **dict.fromkeys(COUNTS, HEADS),
    "intermediate_size": 96,
    "shared_intermediate_size": 96,
    "num_key_value_heads": 2,
    "attention_bias": False,
    "qk_layernorm": False,
}
CALLED = {
    **dict.fromkeys(("d_model", "dim", "dim_out", "embed_dim", "nx"), WIDTH),
    **dict.fromkeys(("hidden_size", "hidden_size_output"), WIDTH),
    **dict.fromkeys(("num_heads", "num_attention_heads", "heads"), HEADS),
    **dict.fromkeys(("layer_idx", "stage_idx", "window_size", "block_id", "index"), 0),
    "config": None,
    "head_width": WIDTH // HEADS,
    "intermediate_size": 96,
    "n_positions": TOKENS,
    "initialize_mixer_weights": False,
    "num_fwd_mem_blocks": 1,
    "hidden_act": "silu",
}
"""Arguments of the constructors beside a config."""
OWN = {"FastSpeech2ConformerConvolutionModule": {"module_config": {"kernel_size": 7}}}
"""Further arguments by class."""
MORE = {
    "BambaMixer": {"mamba_chunk_size": TOKENS},
    "CodeGenAttention": {"rotary_dim": 8},
    "GraniteMoeHybridMambaLayer": {"mamba_chunk_size": TOKENS},
    "GraniteSpeechConformerAttention": {"context_size": TOKENS},
    "GraniteSpeechPlusConformerAttention": {"context_size": TOKENS},
    "Lfm2MoeShortConv": {"num_hidden_layers": 1, "layer_types": ["conv"]},
    "DbrxAttention": {"attn_config": {"clip_qkv": 99.0, "kv_n_heads": 2, "rope_theta": 1e4}},
    "Dots3NoteAudioMLP": {"adapter_input_size": WIDTH},
    "Dots3NoteTextAttention": {"num_key_value_heads": HEADS},
    "Dots3NoteVisionAttention": {"adapter_in_dim": WIDTH},
    "FalconH1Mixer": {"mamba_chunk_size": TOKENS},
    "Glm5NextTextAttention": {"num_key_value_heads": HEADS},
    "Mamba2Mixer": {"head_dim": 32, "n_groups": 2},
    "NemotronHMamba2Mixer": {"mamba_num_heads": 8, "mamba_head_dim": 16, "chunk_size": TOKENS},
    "Qwen4ExpTextAttention": {
        "head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": TOKENS,
        "indexer_compress_ratio": 2,
    },
}
"""Sizes that fit together, by class."""
VARIANTS = {
    "FalconAttention": [
        {"multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ],
    "GPTBigCodeAttention": [{"multi_query": False}],
}
FILES = Path(transformers.__file__).parent.glob("models/*/modeling_*")
CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
DEFINED = [(name, path) for path in FILES for name in CLASS.findall(path.read_text())]
"""Every class, and the file that it is in."""


def class_of(kind):
    *file, name = kind.split(".")
    (path,) = (p for n, p in DEFINED if n == name and (not file or p.stem == file[0]))
    module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    return getattr(module, name), module


def configs(cls, module, options):
    """The config that a class names, and others of its file, with small sizes."""
    named = inspect.signature(cls.__init__).parameters["config"].annotation
    for kind in (named, *(c for n, c in vars(module).items() if n.endswith("Config"))):
        if not issubclass(kind, transformers.PreTrainedConfig):
            continue
        default = kind()
        kind = type(getattr(default, "text_config", None) or default)
        default = kind()
        default.allow_global_per_layer_attribute_access = True  # where a layer may have its own
        sizes = {n: size for n, size in SIZES.items() if isinstance(getattr(default, n, None), int)}
        config = kind(**{**sizes, **MORE.get(cls.__name__, {}), **options})
        config._attn_implementation = "eager"
        yield config


def instance(kind, options):
    cls, module = class_of(kind)
    parameters = inspect.signature(cls.__init__).parameters
    called = {name: CALLED[name] for name in parameters if name in CALLED} | OWN.get(kind, {})
    if "config" not in called:
        return cls(**called)
    for config in configs(cls, module, options):
        try:
            return cls(**{**called, "config": config})
        except AttributeError:  # of another part of the model
            continue
    raise AssertionError(f"no config of {module.__name__} builds {kind}")


def build(kind, options):
    torch.manual_seed(0)
    module = instance(kind, options).eval()
    if kind == "FalconH1Mixer":
        module.mup_vector = torch.ones(1)  # which the model gives it
    with torch.no_grad():
        for name, p in module.named_parameters():
            added = p.ndim < 2 or re.search("bias|rel_pos|adapter", name)
            p.copy_(torch.zeros_like(p) if added else torch.randn_like(p) * p.shape[-1] ** -0.5)
        for inner in module.modules():
            if "Norm" in type(inner).__name__ and getattr(inner, "weight", None) is not None:
                inner.weight.fill_(1.0)
    return module


IMAGES = re.compile("Sam|GotOcr2|SegGpt|SLANeXt|PPFormulaNet|Florence2VisionWindow|VitDet|FocalNet")
MASKS = {
    "DisentangledSelfAttention": torch.ones(2, 1, TOKENS, TOKENS),
    "FalconAttention": torch.zeros(2, 1, TOKENS, TOKENS),
    "LayoutLMv2SelfAttention": torch.zeros(2, 1, 1, TOKENS),
    "Qwen4ExpTextAttention": torch.zeros(2, 1, TOKENS, TOKENS),
}


def inputs(module, columns):
    """Return tokens, and the other arguments of `forward` by name."""
    parameters, name = inspect.signature(module.forward).parameters, type(module).__name__
    sizes = (
        getattr(module, name, None) for name in ("rotary_ndims", "qk_rope_head_dim", "head_dim")
    )
    size = next(filter(None, sizes), columns // HEADS)
    flat = "cu_seqlens" in parameters or "grid_thw" in parameters
    shape = [TOKENS, columns] if flat else [2, TOKENS, columns]
    if IMAGES.search(name):
        shape = [2, 4, 4, columns]
    more = {
        "alibi": None if "position_embeddings" in parameters else torch.zeros(2 * HEADS, 1, TOKENS),
        "attention_dists": torch.zeros(TOKENS, TOKENS, dtype=torch.long),
        "attention_mask": MASKS.get(name),
        "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
        "grid_thw": [[1, 2, TOKENS // 2]],
        "latents": torch.randn(2, TOKENS, columns),
        "layer_idx": next(iter(getattr(module, "layer_dic", [0]))),
        "mask": torch.ones(2, TOKENS if name.startswith("EsmFold") else 2 * TOKENS),
        "position_bias": torch.zeros(HEADS, 1, TOKENS),
        "position_embeddings": torch.randn(2, *([] if flat else [2]), TOKENS, size).unbind(0),
        "position_ids": torch.arange(TOKENS)[None],
        "rel_2d_pos": torch.zeros(2, HEADS, TOKENS, TOKENS),
        "rel_pos": torch.zeros(2, HEADS, TOKENS, TOKENS),
        "shared_kv_states": {},
        "residual": torch.zeros(2, TOKENS, columns),
    }
    if name.endswith("GatingMLP"):  # which takes it for one of several maps
        more.pop("layer_idx")
    if name == "DeepseekV2Attention":  # turns pairs as complex numbers
        angles = torch.randn(1, TOKENS, size // 2)
        more["position_embeddings"] = torch.polar(torch.ones_like(angles), angles)
    return torch.randn(shape), {name: x for name, x in more.items() if name in parameters}


class Cut:
    """A module, its fused weight, and what comes out when some of its maps are scaled."""

    def __init__(self, key, options):
        kind, name = key.rsplit(".", 1)
        self.module = build(kind, options)
        layer = getattr(self.module, name)
        self.weight, self.start = layer.weight, layer.weight.detach().clone()
        across = type(layer).__name__ == "Conv1D"
        rows, columns = reversed(self.weight.shape) if across else self.weight.shape[:2]
        word, _ = fused.known(self.module, name, rows, columns)
        self.spec = f"c {word}" if across else word + " c" * (self.weight.ndim - 1)
        self.tokens, self.more = inputs(self.module, columns)

    def parts(self):
        blocks = axes.parse(self.spec, tuple(self.weight.shape))
        regions = [(block, block.region(self.weight)) for block in blocks]
        return [p for block, r in regions for p in (r.unbind(0) if block.batch else [r])]

    @torch.no_grad()
    def out(self, scales=()):
        """Return the output with map i scaled by scales[i]."""
        self.weight.copy_(self.start)
        for index, scale in dict(scales).items():
            self.parts()[index].mul_(scale)
        result = self.module(self.tokens.clone(), **self.more)
        return result[0] if isinstance(result, tuple | list) else result


def cases(*maps):
    """The keys of the table with these maps, each with options of its config."""
    known = fused.KNOWN["transformers"].items()
    keys = [key for key, (_, named) in known if named in maps]
    tried = [(key, more) for key in keys for more in [{}, *VARIANTS.get(key.rsplit(".", 1)[0], [])]]
    names = ["-".join([key, *map(str, more)]) for key, more in tried]
    return pytest.mark.parametrize(("key", "options"), tried, ids=names)


def effects_of(nothing, change=(), same=()):
    """Return the maps to scale, {place: factor}, that leave nothing, make a change, or none."""
    return {"nothing": nothing, "a change": change, "no change": same}


def product(*factors):
    """Return the effects on a product, which is zero without one of its factors."""
    return effects_of([{i: 0.0} for i in factors])


EFFECTS = {
    "q, k, v": effects_of([{2: 0.0}], [{1: 0.0}, {0: 2.0}], [{0: 2.0, 1: 0.5}]),
    "q, v, k, in four parts": effects_of([{1: 0.0}], [{2: 0.0}, {0: 2.0}], [{0: 2.0, 2: 0.5}]),
    "k, v": effects_of([{1: 0.0}], [{0: 0.0}]),
    "q, k": effects_of([], [{0: 2.0}], [{0: 2.0, 1: 0.5}]),
    "x, gates": effects_of([{0: 0.0}], [{1: 0.0}]),  # gates of sigmoid(0)
    # steps of softplus(0)
    "dt, B, C": effects_of([{1: 0.0}, {2: 0.0}], [{0: 0.0}], [{1: 2.0, 2: 0.5}]),
    "z, x, B, C, dt": product(0, 1, 2, 3),  # dt at zero is a step of softplus(0)
    "B, C, x": product(0, 1, 2),
    "q, context, gates": product(0, 1, 2),
    **dict.fromkeys(("gate, up", "up, gate", "x, z", "x, z, row by row"), product(0, 1)),
}
CHANGED = {"dt, B, C": 0.01, "q, k": 0.0, "x, gates": 0.0}
"""Least size of a change, as a part of the largest output (0.1)."""
UNCHANGED = {"dt, B, C": 1e-6, "q, k": 0.0}
"""Largest size of no change (1e-4): norms of q and k have an eps of 1e-5 beside their 1."""
LINEAR = re.compile("GatedDeltaNet|Lightning")
"""Attentions without a softmax: products of all three maps."""


@cases(*EFFECTS)
def test_the_maps_are_where_forward_has_them(key, options):
    cut = Cut(key, options)
    named = fused.KNOWN["transformers"][key][1]
    effects = product(0, 1, 2) if LINEAR.search(key) else dict(EFFECTS[named])
    if named == "dt, B, C":
        cut.tokens, cut.more = inputs(cut.module, cut.module.hidden_size)
    if key.startswith("MiniMaxM3"):  # gate·(up + 1)
        effects = product(0)
    if hasattr(cut.module, "q_norm") and effects["a change"]:
        effects["a change"] = [{1: 0.0}]
    if hasattr(cut.module, "b_layernorm"):
        effects["no change"] = []
    assert len(cut.parts()) == len(named.partition(", in")[0].partition(", row")[0].split(", "))
    base = cut.out()
    largest = float(base.abs().max())
    assert largest > 0
    for scales in effects["nothing"]:
        assert not cut.out(scales).any(), scales
    for scales in effects["no change"]:
        bound = UNCHANGED.get(named, 1e-4) * largest
        torch.testing.assert_close(cut.out(scales), base, rtol=0, atol=bound)
    for scales in effects["a change"]:
        out = cut.out(scales)
        assert out.any() and (out - base).abs().max() > CHANGED.get(named, 0.1) * largest, scales


OTHER_TESTS = {"latents, k", "k, v in each head", "q, gates", "gates of two inputs"}
"""Maps with tests of their own below, by `cases`; the rest of them by name."""


def test_every_known_weight_is_looked_at():
    maps = {maps for _, maps in fused.KNOWN["transformers"].values()}
    others = {"q, k, values, gates", "b, a", "scores, k, v"}
    assert maps == {*EFFECTS, *OTHER_TESTS, *others}


class ExpandedError(Exception):
    """Latents and rotary keys on their way to keys and values."""


@cases("latents, k", "k, v in each head")
def test_latents_keys_and_values_are_where_forward_has_them(key, options, monkeypatch):
    cut = Cut(key, options)
    module, width = cut.module, cut.module.config.hidden_size
    tokens, more = inputs(module, width)
    latents = torch.randn(2, 1, TOKENS, module.kv_lora_rank)
    expand = module.expand_kv

    def caught(*args):
        raise ExpandedError(*args)

    @torch.no_grad()
    def taken(place):
        """Return which of both is not zero when the map at this place is zero."""
        cut.weight.copy_(cut.start)
        cut.parts()[place].zero_()
        if "kv_b" in key:
            turned = torch.randn(2, 1, TOKENS, module.qk_rope_head_dim)
            keys, values = expand(latents, turned)
            keys = keys[..., : module.qk_nope_head_dim]
            return bool(keys.any()), bool(values.any())
        with pytest.raises(ExpandedError) as both:
            module(tokens, **more)
        return tuple(bool(x.any()) for x in both.value.args)

    monkeypatch.setattr(module, "expand_kv", caught)
    assert len(cut.parts()) == 2
    assert [taken(0), taken(1)] == [(False, True), (True, False)]


@cases("q, gates")
def test_gates_of_an_attention_are_where_forward_has_them(key, options):
    cut = Cut(key, options)
    base, open_half = cut.out(), cut.out({1: 0.0})
    least = 0.1 * base.abs().max()
    assert len(cut.parts()) == 2
    assert (open_half - base).abs().max() > least
    # sigmoid(x) + sigmoid(-x) = 1, and a norm takes the scale of the queries but for its eps.
    torch.testing.assert_close(base + cut.out({1: -1.0}), 2 * open_half, rtol=0, atol=1e-5)
    torch.testing.assert_close(cut.out({0: 2.0}), base, rtol=0, atol=1e-3 * least)


@cases("gates of two inputs")
def test_each_gate_is_that_of_its_input(key, options):
    cut = Cut(key, options)
    one, other = torch.randn(2, 2, TOKENS, WIDTH)
    none = torch.zeros_like(one)

    @torch.no_grad()
    def out(place, *given):
        cut.weight.copy_(cut.start)
        base = cut.module(*given)
        cut.parts()[place].mul_(-1.0)
        return torch.equal(cut.module(*given), base)

    assert [out(place, one, none) for place in (0, 1)] == [False, True]
    assert [out(place, none, other) for place in (0, 1)] == [True, False]


def test_the_maps_of_qwen3_next_are_those_it_takes_apart():
    qkvz, ba = (Cut(f"Qwen3NextGatedDeltaNet.{n}", {}) for n in ("in_proj_qkvz", "in_proj_ba"))
    module, tokens = qkvz.module, qkvz.tokens

    @torch.no_grad()
    def taken(scales, gates):
        """q, k, values, z, b, a after the maps at these places are set to zero."""
        for cut, places in ((qkvz, scales), (ba, gates)):
            cut.weight.copy_(cut.start)
            for place in places:
                cut.parts()[place].zero_()
        both = tokens @ qkvz.weight.T, tokens @ ba.weight.T
        return [bool(x.any()) for x in module.fix_query_key_value_ordering(*both)]

    assert len(qkvz.parts()) == 4
    assert taken([0], [0]) == [False, True, True, True, False, True]
    assert taken([1], [1]) == [True, False, True, True, True, False]
    assert taken([2], []) == [True, True, False, True, True, True]
    assert taken([3], []) == [True, True, True, False, True, True]


def test_the_maps_of_mobilevit_are_those_it_takes_apart():
    cls, _ = class_of("MobileViTV2LinearSelfAttention")
    module = cls(transformers.MobileViTV2Config(), embed_dim=4).eval()
    weight = module.qkv_proj.convolution.weight
    start, pixels = weight.detach().clone(), torch.randn(2, 4, 3, 5)
    for layer in (module.qkv_proj, module.out_proj):
        torch.nn.init.zeros_(layer.convolution.bias)
    word, _ = fused.known(module, "qkv_proj", 9, 4)
    parts = axes.parse(f"{word} c c c", tuple(weight.shape))

    @torch.no_grad()
    def without(place):
        weight.copy_(start)
        parts[place].region(weight).zero_()
        return module(pixels)

    assert without(0).any() and not without(1).any() and not without(2).any()


def test_stacks_of_experts_are_stored_as_transformers_says():
    """Its own attributes are the oracle: `is_transposed`, and `is_concatenated` of gate and up."""
    tried = set()
    for kind in {name for name, _ in DEFINED if name.endswith("Experts")}:
        try:
            with torch.device("meta"):
                module = instance(kind, {})
        except Exception:  # its sizes are None, or are not those here
            continue
        if not hasattr(module, "is_transposed") or not hasattr(module, "gate_up_proj"):
            continue
        tried.add(kind)
        gate_up = "(b=2 r)" if module.is_concatenated else "(r b=2)"
        for key, word in (("gate_up_proj", gate_up), ("down_proj", "r")):
            spec, _ = fused.experts(module, key)
            assert spec == (f"b c {word}" if module.is_transposed else f"b {word} c"), kind
    assert tried >= {*fused.EXPERTS["transformers"], "MixtralExperts"} - {"Llama4TextExperts"}
    assert len(tried) > 50


LLAMA = {"num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 32, "head_dim": 8}
LLAMA |= {"vocab_size": 32, "intermediate_size": 16, "num_local_experts": 2}


@pytest.mark.parametrize("half", [0, 1])
def test_experts_of_llama4_are_cut_into_gate_and_up(half):
    """silu(gate)·up is zero where either is: with one of them at zero, nothing comes out."""
    torch.manual_seed(0)
    cls, _ = class_of("Llama4TextExperts")
    module = cls(transformers.Llama4TextConfig(**LLAMA))
    spec, _ = fused.experts(module, "gate_up_proj")
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
        assert module(torch.randn(8, 32)).any()
        (block,) = axes.parse(spec, tuple(module.gate_up_proj.shape))
        block.region(module.gate_up_proj)[:, half].zero_()
        assert not module(torch.randn(8, 32)).any()
