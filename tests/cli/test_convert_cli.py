"""`nucleon convert`: a file in, a file out that the new optimizer loads."""

import json

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import nucleon
from nucleon.cli.convert import convert as verb
from nucleon.optim.migrate import convert

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))

def pair(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others)]

def groups(model):
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])

def nothing():
    return None
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(verb)
    (tmp_path / "converted_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    old = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        old.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        old.step()
    return model, old


BUILD = ("--model", "converted_model.py:build")


@pytest.mark.parametrize("inside", [None, "optimizer", "optimizer_states"])
def test_a_checkpoint_becomes_one_of_leon(command, trained, inside, tmp_path):
    model, old = trained
    state = old.state_dict()
    wrapped = {"optimizer": {"optimizer": state}, "optimizer_states": {"optimizer_states": [state]}}
    torch.save(wrapped.get(inside, state), tmp_path / "in.pt")
    result = command("in.pt", "sub/out.pt", *BUILD, "--option", "lr=0.3", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["parameters"]["0.weight"].startswith("momentum of AdamW")
    loaded = nucleon.Leon.for_model(model, lr=0.3)
    loaded.load_state_dict(torch.load(tmp_path / "sub/out.pt", weights_only=True))
    live = nucleon.Leon.for_model(model, lr=0.3, momentum=0.9)  # β₁ of the old run
    convert(old, live)
    for p in model.parameters():
        assert all(torch.equal(loaded.state[p][k], live.state[p][k]) for k in live.state[p])
    matrix, rest = loaded.param_groups
    assert matrix["lr"] == 0.3 and matrix["momentum"] == 0.9
    assert rest["lr"] == 1e-3 and rest["weight_decay"] == 0.01  # torch's own


def test_the_table_says_what_became_of_each(command, trained, tmp_path):
    torch.save({"mine": trained[1].state_dict()}, tmp_path / "in.pt")
    result = command("in.pt", "out.pt", *BUILD, "--key", "mine", "--to", "muon")
    assert result.exit_code == 0, result.output
    assert "1.bias" in result.output and "kept: moments and step count" in result.output
    assert "adamw: 4 parameters of AdamW" in result.output
    assert "betas (0.9, 0.999) → betas (0.9, 0.999)" in result.output
    assert "Muon.for_model(model, lr=0.001, momentum=0.9, scale='match-adamw'" in result.output


@pytest.mark.parametrize("built", ["pair", "groups"])
def test_states_without_names_go_through_the_optimizers_they_were_of(command, built, tmp_path):
    """Muon beside AdamW, and AdamW in two groups: what most runs save."""
    namespace = {}
    exec(MODEL, namespace)
    model = namespace["build"]()
    olds = namespace[built](model)
    olds = olds if isinstance(olds, list) else [olds]
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for old in olds:
            old.step()
    torch.save({f"state{i}": o.state_dict() for i, o in enumerate(olds)}, tmp_path / "in.pt")
    keys = [word for i in range(len(olds)) for word in ("--key", f"state{i}")]
    refused = command("in.pt", "out.pt", *BUILD, *keys)
    assert refused.exit_code == 2 and "which is which" in refused.output
    result = command("in.pt", "out.pt", *BUILD, *keys, "--old", f"converted_model.py:{built}")
    assert result.exit_code == 0, result.output
    loaded = nucleon.Leon.for_model(model)
    live = nucleon.Leon.for_model(model, momentum={"pair": 0.95, "groups": 0.9}[built])
    loaded.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    convert(olds, live)
    for p in model.parameters():
        assert all(torch.equal(loaded.state[p][k], live.state[p][k]) for k in live.state[p])
    assert live.state[model[0].weight]["total"].abs().max() > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--key", "nowhere"), "has no nowhere"),
        (("--to", "lion"), "no optimizer 'lion'"),
        (("--option", "lr"), "NAME=VALUE"),
        (("--option", "speed=3"), "no option 'speed'"),
        (("--model", "converted_model.py:nowhere"), "cannot be imported"),
        (("--model", "converted_model.py:nothing"), "returned NoneType"),
        (("--model", "nowhere"), "package.module:function"),
        (("--old", "converted_model.py:nowhere"), "cannot be imported"),
        (("--old", "converted_model.py:pair"), "returned 2 for 1 saved states"),
        (("--old", "converted_model.py:groups"), "does not take its state"),
        (("--momentum", "mean"), "momentum must be one of"),
    ],
)
def test_bad_words_get_a_sentence(command, trained, tmp_path, words, message):
    torch.save(trained[1].state_dict(), tmp_path / "in.pt")
    result = command("in.pt", "out.pt", *BUILD, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out.pt").exists()


def test_bad_files_get_a_sentence(command, tmp_path):
    (tmp_path / "in.pt").write_text("no checkpoint")
    assert command("in.pt", "out.pt", *BUILD).exit_code == 2
    assert command("missing.pt", "out.pt", *BUILD).exit_code == 2
    torch.save({"weights": 1}, tmp_path / "in.pt")
    result = command("in.pt", "out.pt", *BUILD)
    assert result.exit_code == 2 and "it has weights" in result.output
