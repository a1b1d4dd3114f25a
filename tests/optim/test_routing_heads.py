"""Which modules are output heads, and the warning where one seems to be missed."""

import ast
import re
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import nucleon


def heads_of(model, **options):
    """The names of the parameters that go to AdamW as heads."""
    rows = nucleon.Leon.for_model(model, **options).explain()
    return {row.name for row in rows if "output head" in row.reason}


def net(**children):
    model = nn.Module()
    model.body = nn.Linear(8, 8)
    for name, child in children.items():
        setattr(model, name, child)
    return model


def stack(**children):
    """A network of the given children alone, in order."""
    model = net(**children)
    del model.body
    return model


def linear():
    return nn.Linear(8, 3)


def mlp(out=3, inside=8):
    return nn.Sequential(nn.Linear(8, inside), nn.ReLU(), nn.Linear(inside, out))


def boxes():
    """A network as detectors have it for boxes."""
    return stack(layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)]))


SEVERAL = {
    "DeiT-distilled, LeViT, EfficientFormer": (
        lambda: net(head=linear(), head_dist=linear()),
        {"head.weight", "head_dist.weight"},
    ),
    "VOLO": (lambda: net(aux_head=linear(), head=linear()), {"aux_head.weight", "head.weight"}),
    "a norm before each": (
        lambda: net(
            head=nn.Sequential(nn.BatchNorm1d(8), linear()),
            head_dist=nn.Sequential(nn.BatchNorm1d(8), linear()),
        ),
        {"head.1.weight", "head_dist.1.weight"},
    ),
    "a list": (
        lambda: net(heads=nn.ModuleList([linear(), mlp(), linear()])),
        {"heads.0.weight", "heads.1.2.weight", "heads.2.weight"},
    ),
    "a dict": (
        lambda: net(classifiers=nn.ModuleDict({"age": linear(), "name": mlp()})),
        {"classifiers.age.weight", "classifiers.name.2.weight"},
    ),
    "actor and critic": (
        lambda: net(actor=mlp(), critic=mlp()),
        {"actor.2.weight", "critic.2.weight"},
    ),
    "an actor with as many actions as observations": (
        lambda: stack(actor=mlp(8, inside=16), critic=mlp(1, inside=16)),
        {"actor.2.weight", "critic.2.weight"},
    ),
    "an auxiliary one": (  # as in Inception and GoogLeNet
        lambda: net(aux=stack(fc1=nn.Linear(8, 6), fc2=nn.Linear(6, 5)), fc=nn.Linear(8, 5)),
        {"aux.fc2.weight", "fc.weight"},
    ),
    "policy and value heads": (
        lambda: net(policy_head=linear(), value_head=linear()),
        {"policy_head.weight", "value_head.weight"},
    ),
    "of one step of a wrapper": (
        lambda: wrapped("net", net(fc=linear())),
        {"net.fc.weight"},
    ),
    "of two": (
        lambda: wrapped("module", wrapped("_orig_mod", net(fc=linear()))),
        {"fc.weight"},
    ),
    "of parts side by side": (  # as in Bark
        lambda: stack(coarse=net(lm_head=linear()), fine=net(lm_heads=nn.ModuleList([linear()]))),
        {"coarse.lm_head.weight", "fine.lm_heads.0.weight"},
    ),
    "further down, beside one": (
        lambda: net(part=net(inner=net(lm_head=nn.Linear(8, 5))), head=linear()),
        {"part.inner.lm_head.weight", "head.weight"},
    ),
    "of a projection to a vocabulary": (
        lambda: net(decoder=net(stack=net(output_projection=nn.Linear(8, 5))), head=linear()),
        {"decoder.stack.output_projection.weight", "head.weight"},
    ),
    "one that is not the last weight of its container": (  # as in SAM and UperNet
        lambda: net(mask_head=stack(proj_out=linear(), layers=nn.ModuleList([nn.Linear(8, 8)]))),
        {"mask_head.proj_out.weight"},
    ),
    "DETR": (
        lambda: net(class_labels_classifier=linear(), bbox_predictor=boxes()),
        {"class_labels_classifier.weight", "bbox_predictor.layers.1.weight"},
    ),
    "a detector whose boxes go back into it": (
        lambda: stack(
            decoder=net(
                query_pos=nn.Linear(4, 8),
                bbox_embed=nn.ModuleList([boxes(), boxes()]),
                class_embed=nn.ModuleList([linear(), linear()]),
            ),
            enc_score_head=linear(),
        ),
        {
            *(f"decoder.bbox_embed.{i}.layers.1.weight" for i in range(2)),
            *(f"decoder.class_embed.{i}.weight" for i in range(2)),
            "enc_score_head.weight",
        },
    ),
    "classes and boxes of each region": (  # as in torchvision
        lambda: net(
            roi_heads=stack(
                box_head=stack(fc6=nn.Linear(8, 16), fc7=nn.Linear(16, 16)),
                box_predictor=stack(cls_score=nn.Linear(16, 3), bbox_pred=nn.Linear(16, 12)),
            )
        ),
        {f"roi_heads.box_predictor.{name}.weight" for name in ("cls_score", "bbox_pred")},
    ),
    "a detector with as many classes as colours": (  # as in Faster R-CNN
        lambda: stack(
            stem=nn.Conv2d(3, 8, 3),
            rpn=stack(head=stack(cls_logits=nn.Conv2d(8, 3, 1), bbox_pred=nn.Conv2d(8, 12, 1))),
            box_head=nn.Linear(8, 7),
        ),
        {"rpn.head.cls_logits.weight", "rpn.head.bbox_pred.weight", "box_head.weight"},
    ),
    "one level down": (
        lambda: net(decoder=net(lm_head=linear())),
        {"decoder.lm_head.weight"},
    ),
}


def wrapped(name, model):
    outer = nn.Module()
    setattr(outer, name, model)
    return outer


@pytest.mark.parametrize("case", SEVERAL)
def test_all_heads_are_found(case):
    build, expected = SEVERAL[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert heads_of(build()) == expected


def test_a_head_decides_for_a_layer_that_shares_its_weight():
    model = net(inner=linear(), ctc_head=linear())
    model.ctc_head.weight = model.inner.weight
    (row,) = (r for r in nucleon.Leon.for_model(model).explain() if r.name == "inner.weight")
    assert row.route == "adamw" and "Linear and output head" in row.reason


def test_a_tied_head_of_a_part_is_a_head_beside_that_of_the_model():
    part = net(embed=nn.Embedding(3, 8), lm_head=linear())
    part.lm_head.weight = part.embed.weight
    assert heads_of(net(part=part, head=linear())) == {"head.weight", "part.embed.weight"}


def test_a_told_head_may_be_a_list():
    model = net(tops=nn.ModuleList([linear(), linear()]))
    assert heads_of(model, head="tops") == {"tops.0.weight", "tops.1.weight"}


def test_a_language_model_with_another_head_has_both():
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False, num_labels=3
    )
    model = transformers.GPT2DoubleHeadsModel(config)
    assert heads_of(model) == {"lm_head.weight", "multiple_choice_head.summary.weight"}


def test_a_value_head_around_a_language_model_has_both():
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)
    config.tie_word_embeddings = False
    model = nn.Module()
    model.pretrained_model = transformers.GPT2LMHeadModel(config)
    model.v_head = linear()
    assert heads_of(model) == {"pretrained_model.lm_head.weight", "v_head.weight"}


@pytest.mark.parametrize("name", ["multihead_attn", "overhead", "heading", "subheads"])
def test_a_name_with_those_letters_is_no_head(name):
    assert heads_of(net(**{name: nn.Linear(8, 8)}, head=linear())) == {"head.weight"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))


HIDDEN = {
    "attention at the top": (
        lambda: stack(multi_head_attention=Attention(), ff=nn.Linear(8, 8), out=linear()),
        "out",
    ),
    "attention one level down": (
        lambda: stack(encoder=stack(multi_head_attention=Attention()), out=linear()),
        "out",
    ),
    "the heads of attention": (
        lambda: net(attn_heads=nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), out=linear()),
        "out",
    ),
    "heads that are joined": (
        lambda: stack(heads=nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), out=linear()),
        "out",
    ),
    "a number of heads": (lambda: net(num_heads=nn.Linear(8, 5), out=nn.Linear(5, 3)), "out"),
    "a projection": (lambda: stack(attn=stack(head_proj=nn.Linear(8, 8)), out=linear()), "out"),
    "a scale": (
        lambda: stack(block=stack(logits_scale=nn.Linear(8, 8), w=nn.Linear(8, 8)), out=linear()),
        "out",
    ),
    "a hidden fc": (
        lambda: stack(stem=nn.Conv2d(3, 8, 3), fc=nn.Linear(8, 8), last=linear()),
        "last",
    ),
    "an fc of a list": (lambda: stack(fc=nn.ModuleList([nn.Linear(8, 8), linear()])), None),
    "numbers that become an image": (  # as in DCGAN
        lambda: stack(fc=nn.Linear(100, 4 * 64), up=nn.ConvTranspose2d(64, 9, 4), head=linear()),
        None,
    ),
    "a convolution before the classifier": (  # as in timm's EfficientNet
        lambda: stack(conv_head=nn.Conv2d(4, 8, 1), classifier=linear()),
        None,
    ),
    "as wide, before the classifier": (  # as in DistilBERT
        lambda: net(pre_classifier=nn.Linear(8, 8), classifier=linear()),
        None,
    ),
    "a norm behind it": (  # as in ModernBERT
        lambda: net(head=stack(dense=nn.Linear(8, 8), norm=nn.LayerNorm(8)), classifier=linear()),
        None,
    ),
    "before logits": (lambda: stack(pre_logits=nn.Linear(6, 8), head=linear()), None),
}  # fmt: skip
"""Modules with the name of a head that do not end the network, and what the warning names."""


@pytest.mark.parametrize("case", HIDDEN)
def test_what_does_not_end_the_network_is_no_head(case):
    build, last = HIDDEN[case]
    model = build()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        found = heads_of(model)
    if last is None:
        names = [name for name, p in model.named_parameters() if p.ndim > 1]
        assert found == {names[-1]} and not said
    else:
        assert not found and len(said) == 1
        assert f"head={last!r}" in str(said[0].message)


def test_a_head_that_is_registered_before_the_layers_is_found():
    model = stack(embed=nn.Embedding(9, 8), lm_head=nn.Linear(8, 9), layers=Attention())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert heads_of(model) == {"lm_head.weight"}


def test_an_image_that_is_given_back_ends_the_network_wherever_the_other_is_taken():
    model = stack(time=nn.Linear(4, 8), conv_in=nn.Conv2d(3, 8, 3), conv_out=nn.Conv2d(8, 3, 3))
    with pytest.warns(UserWarning, match="head='conv_out'"):
        nucleon.Leon.for_model(model)


def test_scores_of_attention_that_a_module_holds_are_no_layer_behind_its_map():
    class GraphAttention(nn.Module):
        def __init__(self, inside, out):
            super().__init__()
            self.lin = nn.Linear(inside, out)
            self.att_src = nn.Parameter(torch.ones(1, 1, out))

    with pytest.warns(UserWarning, match="head='1.lin'"):
        nucleon.Leon.for_model(nn.Sequential(GraphAttention(8, 8), GraphAttention(8, 3)))


def test_a_router_at_the_top_does_not_stand_beside_the_head():
    model = net(router=nn.Linear(8, 4), head=linear())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert heads_of(model) == {"head.weight"}


@pytest.mark.parametrize("layers", [lambda x: nn.ModuleList([x, x]), lambda x: stack(block=x)])
def test_layers_that_end_with_a_router_do_not_stand_beside_the_head(layers):
    experts = stack(up=nn.Linear(8, 6), down=nn.Linear(6, 8), router=nn.Linear(8, 5))
    model = stack(layers=layers(stack(moe=experts)), lm_head=nn.Linear(8, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert heads_of(model) == {"lm_head.weight"}


def test_names_that_only_stand_at_the_top_are_no_heads_below_it():
    block = net(output=nn.Linear(8, 5), fc=nn.Linear(8, 8))
    assert heads_of(net(block=block, head=linear())) == {"head.weight"}


def test_heads_of_attention_in_a_list_are_no_output_heads():
    def attention():
        heads = [stack(**{n: nn.Linear(8, 2) for n in ("key", "query", "value")}) for _ in "1234"]
        return stack(heads=nn.ModuleList(heads), proj=nn.Linear(8, 8))

    blocks = nn.Sequential(stack(sa=attention()), stack(sa=attention()))
    model = stack(embed=nn.Embedding(9, 8), blocks=blocks, lm_head=nn.Linear(8, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert heads_of(model) == {"lm_head.weight"}


def test_a_score_beside_another_head_is_explained_as_what_it_may_be():
    rows = nucleon.Leon.for_model(net(score=nn.Linear(8, 1), fc=linear())).explain()
    assert "weighs what is pooled" in rows["score.weight"].reason
    (alone,) = (row for row in nucleon.Leon.for_model(net(score=linear())).explain()
                if row.name == "score.weight")  # fmt: skip
    assert alone.reason == "output head, by its name 'score'"


# -------------------------------------------------------------------------------- missed ones

MISSED = {
    "an embedding": lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)),
    "a last layer that changes the width": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)),
    "a convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 1)),
    "a picture": lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.ConvTranspose2d(8, 1, 3)),
    "a bilinear map": lambda: nn.Sequential(nn.LSTM(4, 8), nn.Bilinear(8, 8, 1)),
    "under weight_norm": lambda: nn.Sequential(
        weight_norm(nn.Linear(8, 8)), weight_norm(nn.Linear(8, 3, bias=False))
    ),
    "a probe": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("case", MISSED)
def test_a_head_that_seems_to_be_missed_is_said_once_with_what_to_pass(case):
    with pytest.warns(UserWarning, match="no output head was found") as caught:
        nucleon.Leon.for_model(MISSED[case]())
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "head='1'" in str(caught[0].message)


BESIDE = {
    "policy and value": lambda: net(policy=linear(), value=nn.Linear(8, 1)),
    "pi and vf": lambda: net(pi=mlp(), vf=mlp()),
    "mu and log_std": lambda: net(mu=linear(), log_std=linear()),
    "in a part": lambda: net(core=net(mu=linear(), log_std=linear())),
    "of a list": lambda: net(tops=nn.ModuleList([linear(), nn.Linear(8, 2), mlp()])),
    "one by its name": lambda: net(class_labels_classifier=linear(), boxes=mlp(4)),
    "one within": lambda: net(part=net(inner=net(aux_head=nn.Linear(8, 5))), out=linear()),
    "one before the layers": lambda: stack(head=nn.Linear(8, 5), layers=Attention(), out=linear()),
    "one that does not end it": lambda: net(
        part=net(inner=net(deep=net(aux_head=nn.Linear(8, 5)))),
        head=linear(),
        out=nn.Linear(8, 2),
    ),
    "after a name that is joined to others": lambda: net(
        fc=nn.Linear(8, 5),
        other=nn.Linear(4, 8),
        joint=stack(up=nn.Linear(13, 16), cls=nn.Linear(16, 3)),
    ),
    "a compiled model": lambda: torch.compile(net(policy=linear(), value=linear())),
}


@pytest.mark.parametrize("case", BESIDE)
def test_what_the_warning_says_to_write_routes_all_heads(case):
    model = BESIDE[case]()
    with pytest.warns(UserWarning, match="pass head=") as caught:
        nucleon.Leon.for_model(model)
    (said,) = (str(each.message) for each in caught)
    (written,) = re.findall(r"head=(\[.*?\])", said)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.ndim == 2}
    ending = {n.removeprefix("_orig_mod.") for n, shape in shapes.items() if shape[0] < 8}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert heads_of(model, head=ast.literal_eval(written)) == ending
    assert len(ending) >= 2


def test_a_policy_with_as_many_actions_as_observations_is_told_beside_the_value():
    model = stack(policy=mlp(8, inside=16), value=mlp(1, inside=16))
    with pytest.warns(UserWarning, match=r"head=\['policy.2', 'value.2'\]"):
        nucleon.Leon.for_model(model)


def test_layers_are_not_told_as_heads_beside_each_other():
    def layer():
        attention = stack(
            q=nn.Linear(8, 8), k=nn.Linear(8, 4), v=nn.Linear(8, 4), o=nn.Linear(8, 8)
        )
        return stack(attention=attention, mlp=stack(up=nn.Linear(8, 12), down=nn.Linear(12, 8)))

    model = stack(embed=nn.Embedding(9, 8), layers=nn.ModuleList([layer(), layer()]))
    with pytest.warns(UserWarning, match="seems to have none"):
        nucleon.Leon.for_model(model)


def test_what_shifts_and_scales_is_not_told_as_a_head():
    final = stack(linear=linear(), adaLN_modulation=nn.Sequential(nn.SiLU(), nn.Linear(8, 16)))
    with pytest.warns(UserWarning, match="head='final_layer.linear'"):
        nucleon.Leon.for_model(net(final_layer=final))


DOUBTFUL = {
    "its output is projected on": (
        lambda: net(lm_head=nn.Linear(8, 64), after=nn.Linear(64, 4), head=nn.Linear(4, 3)),
        "lm_head",
    ),
    "of a part as wide as the next": (  # as in SigLIP
        lambda: stack(text=net(head=nn.Linear(8, 8)), vision=net(head=mlp())),
        "text.head",
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_a_head_by_its_name_that_a_later_layer_may_take_is_said_once(case):
    build, name = DOUBTFUL[case]
    model = build()
    with pytest.warns(UserWarning, match=f"^{name} has the name of an output head") as caught:
        found = heads_of(model)
    assert len(caught) == 1 and found and f"{name}.weight" not in found
    written = [ast.literal_eval(x) for x in re.findall(r"{.*?}", str(caught[0].message))]
    assert [{*each.values()} for each in written] == [{"adamw"}, {"matrix"}]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for told in written:
            row = nucleon.Leon.for_model(model, overrides=told).explain()[f"{name}.weight"]
            assert row.route == told[f"{name}.weight"]


NO_HEADS = {
    "a router": lambda: stack(router=stack(classifier=nn.Linear(8, 5))),
    "a router of as many experts as there are classes": lambda: stack(router=linear()),
    "one number for each token": lambda: stack(ff=nn.Linear(8, 8), scale=nn.Linear(8, 1)),
    "gates of attention": lambda: stack(attn=stack(head_gate=nn.Linear(8, 5))),
    "positions of queries": lambda: stack(query_pos_head=nn.Linear(4, 8)),
    "a class embedding": lambda: stack(class_embed=nn.Linear(5, 8)),
}


@pytest.mark.parametrize("case", NO_HEADS)
def test_what_only_sounds_like_a_head_is_a_matrix(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = stack(block=NO_HEADS[case](), ff=nn.Linear(8, 8), head=linear())
        assert heads_of(model) == {"head.weight"}


def test_a_model_of_features_is_not_told_a_hidden_layer_as_its_head():
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="seems to have none") as caught:
        nucleon.Leon.for_model(transformers.BertModel(config))
    assert "pass head=None" in str(caught[0].message)
    assert "head='pooler" not in str(caught[0].message)


@pytest.mark.parametrize("head", [3, [], ["1", 2], {"1"}])
def test_a_head_that_is_no_glob_is_refused(head):
    with pytest.raises(TypeError, match="head must be a glob over module names, a list of them"):
        nucleon.Leon.for_model(MISSED["an embedding"](), head=head)


def test_every_glob_of_a_head_must_match():
    with pytest.raises(ValueError, match="head='2' matches no module"):
        nucleon.Leon.for_model(MISSED["an embedding"](), head=["1", "2"])


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(8, 3),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)),
        lambda: nn.Sequential(nn.Embedding(9, 8).requires_grad_(False), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 16), nn.Linear(16, 8)),
    ],
    ids=["one layer", "as wide", "as deep", "frozen embedding", "a backbone"],
)
def test_where_nothing_looks_like_a_head_nothing_is_said(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rows = nucleon.Leon.for_model(build()).explain()
    assert "matrix" in {row.route for row in rows}  # the last layer too: it was not taken for one


@pytest.mark.parametrize(
    "options",
    [{"head": None}, {"head": "1"}, {"overrides": {"1.weight": "adamw"}},
     {"overrides": {"1.weight": "matrix"}}],
    ids=["no head", "a head", "to AdamW", "a matrix"],
)  # fmt: skip
def test_what_was_told_is_not_warned_of(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        row = nucleon.Leon.for_model(MISSED["an embedding"](), **options).explain()["1.weight"]
    kept = options.get("head", "") is None or "matrix" in options.get("overrides", {}).values()
    assert row.route == ("matrix" if kept else "adamw")


def test_the_warning_points_at_the_caller_through_the_registry_too():
    with pytest.warns(UserWarning, match="no output head") as caught:
        nucleon.create("muon", MISSED["an embedding"]())
    assert caught[0].filename == __file__


def test_a_head_steps_as_adamw_does():
    torch.manual_seed(0)
    model = net(head=linear(), head_dist=linear())
    twin = [
        p.detach().clone().requires_grad_() for p in (model.head.weight, model.head_dist.weight)
    ]
    optimizer = nucleon.Leon.for_model(model, aux_lr=0.01, aux={"weight_decay": 0.0})
    oracle = torch.optim.AdamW(twin, lr=0.01, weight_decay=0.0)
    for p, q in zip((model.head.weight, model.head_dist.weight), twin, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    oracle.step()
    for p, q in zip((model.head.weight, model.head_dist.weight), twin, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
