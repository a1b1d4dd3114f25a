"""Which modules are output heads, and the warning where one seems to be missed."""

import warnings

import pytest
import torch
import transformers
from torch import nn

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


def linear():
    return nn.Linear(8, 3)


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


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
    assert heads_of(net(**{name: linear()}, head=linear())) == {"head.weight"}


def test_names_that_only_stand_at_the_top_are_no_heads_below_it():
    assert heads_of(net(block=net(output=linear(), fc=linear()), head=linear())) == {"head.weight"}


# -------------------------------------------------------------------------------- missed ones

MISSED = {
    "an embedding": lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8)),
    "a last layer that changes the width": lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("case", MISSED)
def test_a_head_that_seems_to_be_missed_is_said_once_with_what_to_pass(case):
    with pytest.warns(UserWarning, match="no output head was found") as caught:
        nucleon.Leon.for_model(MISSED[case]())
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "head='1'" in str(caught[0].message)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(8, 3),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)),
        lambda: nn.Sequential(nn.Embedding(9, 8).requires_grad_(False), nn.Linear(8, 8)),
    ],
    ids=["one layer", "as wide", "no Linear", "frozen embedding"],
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
