"""The output heads of a model, rule by rule, and the one warning where none is found."""

import ast
import re

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import nucleon
from nucleon.optim.routing import heads
from optim.modules import named, rows_of, silent


def heads_of(model, **options):
    """Return the names of the parameters that go to AdamW as heads; a warning is an error."""
    with silent():
        rows = rows_of(model, **options)
    return {name for name, row in rows.items() if "output head" in row.reason}


def net(**children):
    return named("Net", body=nn.Linear(8, 8), **children)


def linear():
    return nn.Linear(8, 3)


def mlp(out=3):
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, out))


def layers(kind):
    """Two layers of a class of this name."""
    return type(kind, (nn.Sequential,), {})(nn.Linear(8, 16), nn.Linear(16, 8))


def boxes():
    """A network as detectors have it for boxes."""
    return net(layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)]))


def tied(**children):
    model = net(embed=nn.Embedding(9, 8), **children)
    for child in children.values():
        child.weight = model.embed.weight
    return model


def telling(head):
    model = net(decoder=head)
    model.get_output_embeddings = lambda: model.decoder
    return model


def detector():
    decoder = net(
        bbox_embed=nn.ModuleList([boxes(), boxes()]),
        class_embed=nn.ModuleList([linear(), linear()]),
    )
    regions = net(predictor=net(cls_score=linear(), bbox_pred=nn.Linear(8, 12)))
    return net(decoder=decoder, enc_score_head=linear(), regions=regions)


DETECTOR = {
    *(f"decoder.bbox_embed.{i}.layers.1" for i in range(2)),
    *(f"decoder.class_embed.{i}" for i in range(2)),
    *("enc_score_head", "regions.predictor.cls_score", "regions.predictor.bbox_pred"),
}
HEADS = {
    "told, square too": (lambda: telling(nn.Linear(8, 8)), {"decoder"}),
    "told, a container": (lambda: telling(mlp()), {"decoder.2"}),
    "tied": (lambda: tied(decoder=nn.Linear(8, 9, bias=False)), {"embed"}),
    "tied, beside one told": (
        lambda: net(lm_head=linear(), part=tied(entities=nn.Linear(8, 9))),
        {"lm_head", "part.embed"}),
    "by words": (lambda: net(head_dist=linear(), aux_head=linear()), {"head_dist", "aux_head"}),
    "a convolution": (lambda: net(head=nn.Conv2d(8, 3, 1)), {"head"}),
    "of a container the last": (lambda: net(classifier=mlp(), fc=linear()), {"classifier.2", "fc"}),
    "but no square one": (
        lambda: net(mask_head=net(proj_out=linear(), last=nn.Linear(8, 8))),
        {"mask_head.proj_out"}),
    "of a container what is named so": (
        lambda: net(decode_head=net(classifier=linear(), pool=nn.Conv2d(4, 8, 1))),
        {"decode_head.classifier"}),
    "of a list each": (
        lambda: net(heads=nn.ModuleList([linear(), mlp()])), {"heads.0", "heads.1.2"}),
    "of a dict each": (
        lambda: net(classifiers=nn.ModuleDict({"age": linear(), "name": mlp()})),
        {"classifiers.age", "classifiers.name.2"}),
    "beside a layer of BigBird's": (
        lambda: net(qa_classifier=net(output=layers("BigBirdOutput"), qa_outputs=linear())),
        {"qa_classifier.qa_outputs"}),
    "registered before the layers": (
        lambda: net(lm_head=linear(), layers=nn.ModuleList([mlp(), mlp()])), {"lm_head"}),
    "within, beside one at the top": (
        lambda: net(a=net(b=net(lm_head=linear(), embed_out=linear())), head=linear()),
        {"a.b.lm_head", "a.b.embed_out", "head"}),
    "of a detector": (detector, DETECTOR),
    "one level down": (
        lambda: net(a=net(fc=linear()), b=net(lm_heads=nn.ModuleList([linear()]))),
        {"a.fc", "b.lm_heads.0"}),
    "one level down, only where there is no other": (
        lambda: net(a=net(fc=linear()), head=linear()), {"head"}),
    "behind wrappers": (lambda: net(module=net(_orig_mod=net(fc=linear()))), {"module.fc"}),
    "under weight_norm": (lambda: net(head=weight_norm(linear())),
                          {f"head.parametrizations.weight.original{part}" for part in range(2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(heads.NAMES))
def test_a_usual_name_at_the_top_is_a_head(name):
    assert heads_of(net(**{name: linear()})) == {f"{name}.weight"}


@pytest.mark.parametrize("case", HEADS)
def test_heads_are_found_by_the_rules(case):
    build, expected = HEADS[case]
    assert {name.removesuffix(".weight") for name in heads_of(build())} == expected


HIDDEN = {
    "attention": lambda: {"multi_head_attention": net(q=linear())},
    "heads of attention": lambda: {"attn_heads": nn.ModuleList([linear(), linear()])},
    "a number of heads": lambda: {"num_heads": linear()},
    "letters of another word": lambda: {"heading": linear(), "overhead": linear()},
    "a square map": lambda: {"cls": nn.Linear(8, 8)},
    "a layer before the head": lambda: {"pre_logits": linear(), "conv_head": nn.Conv2d(8, 3, 1)},
    "stages of a detector": lambda: {"roi_heads": net(box_head=linear())},
    "a convolution of each channel": lambda: {"aux_head": nn.Conv2d(8, 8, 3, groups=8)},
    "an embedding": lambda: {"class_embed": nn.Embedding(9, 8)},
    "a norm": lambda: {"norm_head": nn.LayerNorm((4, 8))},
    "names of the top, below it": lambda: {"block": net(output=linear(), fc=linear())},
    "what shifts and scales": lambda: {"adaln_head": linear()},
    "a pooling": lambda: {"head_pool": layers("SiglipMultiheadAttentionPoolingHead")},
}


@pytest.mark.parametrize("case", HIDDEN)
def test_what_only_sounds_like_a_head_is_none(case):
    assert heads_of(net(**HIDDEN[case](), head=linear())) == {"head.weight"}


def test_a_head_decides_for_a_layer_that_shares_its_weight():
    model = net(inner=linear(), ctc_head=linear())
    model.ctc_head.weight = model.inner.weight
    row = nucleon.Leon.for_model(model).explain()["inner.weight"]
    assert row.route == "adamw" and "Linear and output head" in row.reason
    rows = nucleon.Leon.for_model(model, overrides={"ctc_head.weight": "matrix"}).explain()
    assert rows["inner.weight"].route == "matrix"


def test_an_adapter_beside_a_head_is_a_matrix():
    config = LoraConfig(r=2, target_modules=["head"])
    rows = nucleon.Leon.for_model(get_peft_model(net(head=linear()), config)).explain()
    assert {row.route for row in rows if "lora_" in row.name} == {"matrix"}
    assert {row.name for row in rows if "output head" in row.reason} == {
        "base_model.model.head.base_layer.weight"
    }


# ---------------------------------------------------------------------------- what is told


def test_a_head_may_be_told_by_globs_and_of_a_container_it_is_the_last_map():
    model = net(tops=nn.ModuleList([linear(), mlp(8)]))
    assert heads_of(model, head="tops") == {"tops.0.weight", "tops.1.2.weight"}
    assert heads_of(model, head=["tops.0", "bo*"]) == {"tops.0.weight", "body.weight"}
    assert heads_of(model, head=None) == set()


@pytest.mark.parametrize("head", ["nowhere", ["2", "nowhere"], "1"])
def test_a_head_that_matches_no_map_is_refused(head):
    with pytest.raises(ValueError, match="matches no module of Sequential with a weight"):
        nucleon.Leon.for_model(mlp(), head=head)


def test_a_head_is_told_by_its_name():
    model = mlp()
    with pytest.raises(TypeError, match=r'not a module; write head="lm_head"'):
        nucleon.Leon.for_model(model, head=model[2])


# -------------------------------------------------------------------------------- none found

LAST = {
    "a network of layers": lambda: mlp(),
    "an embedding and a map": lambda: nn.Sequential(nn.Embedding(9, 8), nn.ReLU(), linear()),
    "a picture": lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 1, 3)),
    "a bilinear map": lambda: nn.Sequential(nn.LSTM(4, 8), nn.ReLU(), nn.Bilinear(8, 8, 1)),
    "under weight_norm": lambda: nn.Sequential(linear(), nn.ReLU(), weight_norm(nn.Linear(3, 8))),
    "a depthwise one behind it": lambda: nn.ModuleDict(
        {"0": linear(), "2": linear(), "mix": nn.Conv2d(8, 8, 3, groups=8)}
    ),
    "a probe": lambda: nn.Sequential(linear().requires_grad_(False), nn.ReLU(), nn.Linear(3, 2)),
    "an adaLN behind it": lambda: nn.ModuleDict(
        {"first": linear(), "2": linear(), "adaLN_modulation": nn.Linear(8, 24)}
    ),
}


@pytest.mark.parametrize("case", LAST)
def test_without_a_head_one_warning_names_the_last_map_and_what_to_write(case):
    model = LAST[case]()
    with pytest.warns(UserWarning, match="no output head was found") as caught:
        nucleon.Leon.for_model(model)
    texts = [str(each.message) for each in caught if "output head" in str(each.message)]
    assert len(texts) == 1 and {each.filename for each in caught} == {__file__}
    written = [ast.literal_eval(x) for x in re.findall(r"head=('.*?'|None)", texts[0])]
    assert written == ["2", None]
    overrides = {"adaLN_modulation.weight": "matrix"} if "adaLN" in case else {}
    named = heads_of(model, head=written[0], overrides=overrides)
    assert named and all(head.startswith("2.") for head in named)
    assert not heads_of(model, head=written[1], overrides=overrides)


SILENT = {
    "a single weight": (linear, {}),
    "told to be matrices": (mlp, {"overrides": {"2.weight": "matrix"}}),
    "told to be none": (mlp, {"overrides": {"2.weight": "adamw"}}),
    "all frozen": (lambda: mlp().requires_grad_(False), {}),
    "adapters": (lambda: get_peft_model(mlp(), LoraConfig(r=2, target_modules=["0"])), {}),
}


@pytest.mark.parametrize("case", SILENT)
def test_where_nothing_can_be_missed_nothing_is_said(case):
    build, options = SILENT[case]
    assert heads_of(build(), **options) == set()


def test_the_warning_points_at_the_caller_through_the_registry_too():
    with pytest.warns(UserWarning, match="no output head") as caught:
        nucleon.create("muon", mlp())
    assert caught[0].filename == __file__
