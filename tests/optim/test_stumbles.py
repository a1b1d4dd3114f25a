"""Errors that say what to write for a whole model and options of others; types that see them."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from torch import nn
from transformers import Trainer, TrainingArguments

import nucleon


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))


METHODS = [nucleon.Leon, nucleon.Muon, nucleon.Pion]


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_model_is_sent_to_for_model(method):
    wanted = rf"{method.__name__}\.for_model\(model\)"
    with pytest.raises(TypeError, match=wanted):
        method(network())
    with pytest.raises(ValueError, match=wanted):
        method(network().parameters())
    with pytest.raises(ValueError, match=wanted):
        method(network().named_parameters())


def test_the_class_handed_to_a_trainer_is_sent_to_the_factory(tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(network(), arguments, optimizer_cls_and_kwargs=(nucleon.Leon, {"lr": 0.01}))
    with pytest.raises(ValueError, match=r"for_model.*integrations\.huggingface\.factory"):
        trainer.create_optimizer()


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("betas", 'aux={"betas": …}'),
        ("eps", 'aux={"eps": …}'),
        ("wd", "write weight_decay"),
        ("ns_steps", "write iterations"),
        ("learning_rate", "write lr"),
        ("adjust_lr_fn", 'write scale="spectral"'),
        ("nesterow", "did you mean 'nesterov'?"),
    ],
)
def test_options_of_others_say_what_to_write(option, wanted):
    model = network()
    for make in (
        lambda **words: nucleon.Leon([model[0].weight], **words),
        lambda **words: nucleon.Leon.for_model(model, **words),
        lambda **words: nucleon.create("leon", model, **words),
        lambda **words: nucleon.Leon.for_model(model, overrides={"0.weight": words}),
    ):
        with pytest.raises(TypeError) as error:
            make(**{option: 1})
        assert f"no option '{option}'" in str(error.value) and wanted in str(error.value)


def test_for_model_of_parameters_asks_for_the_model():
    for given in (network().parameters(), list(network().parameters())):
        with pytest.raises(TypeError, match=r"pass the model itself, as for_model\(model\)"):
            nucleon.Leon.for_model(given)


def test_a_wrong_option_of_for_model_is_said_first_with_all_that_it_takes():
    doubtful = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the head that is not found
        with pytest.raises(TypeError, match=r"Leon\.for_model has no option 'speed'") as error:
            nucleon.Leon.for_model(doubtful, speed=3)
    listed = str(error.value).partition("its options are ")[2].split(", ")
    assert {"lr", "aux_lr", "aux", "head", "overrides", "momentum", "beta2"} <= set(listed)
    with pytest.raises(TypeError, match="did you mean 'overrides'"):
        nucleon.Leon.for_model(doubtful, override={})


def test_arguments_of_for_model_are_named_by_the_constructor():
    with pytest.raises(TypeError, match="'aux_lr': it is an argument of for_model"):
        nucleon.Leon([network()[0].weight], aux_lr=1e-3)


TYPED = """
from typing import Any
from torch import nn
import nucleon
from nucleon.optim import create

model = nn.Linear(4, 4)
options: dict[str, Any] = {"speed": 3}
reveal_type(create("pion", model, samples=2))
create("muon", model, aux={"betas": (0.9, 0.95)}, coefficients=[(1.5, -0.5, 0.0)])
reveal_type(nucleon.Leon.for_model(model, 0.1, aux_lr=1e-3, weight_decay=0.1))
nucleon.Leon.for_model(model, overrides={"bias": {"lr": 0.1}, "weight": "matrix"})
create(str(model), model, lr=0.1, **options)  # of a registered one
nucleon.Leon.for_model(model, speed=3)  # wrong
nucleon.Leon.for_model(model, samples=3)  # wrong
nucleon.Muon.for_model(model, weight_decay="much")  # wrong
nucleon.create("leon", model, speed=3)  # wrong
nucleon.create("leon", model, wd=0.1)  # wrong
nucleon.create(str(model), model, speed=3)  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_sees_wrong_keywords_and_which_optimizer_is_made(tmp_path):
    (tmp_path / "typed.py").write_text(TYPED)
    source = str(Path(nucleon.__file__).parents[1])
    settings = {"typeCheckingMode": "basic", "extraPaths": [source], "include": ["typed.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*words, "-p", tmp_path], capture_output=True, text=True, cwd=tmp_path)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = {d["range"]["start"]["line"] for d in found if d["severity"] == "error"}
    wrong = {i for i, line in enumerate(TYPED.splitlines()) if line.endswith("# wrong")}
    assert errors == wrong, found
    told = [d["message"].rpartition(" is ")[2] for d in found if d["severity"] == "information"]
    assert told == ['"MatrixOptimizer"', '"Leon"']
