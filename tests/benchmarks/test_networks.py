"""The benchmark of whole models, tiny and on the CPU: it runs, and both sides step one thing."""

import json
import sys
from pathlib import Path

import pytest
import torch

import nucleon

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import models
import models_report
import networks

MATRICES = {  # of one layer, by hand: 16 wide, 4 heads of 4, keys and values of 2 heads
    "gpt2": 6,  # q, k, v in one weight; projection; the two of the MLP
    "llama-1b": 7,
    "qwen3-0.6b": 7,
    "moe": 4 + 1 + 4 * 3,  # attention, router, four experts of gate, up and down
    "lora": 14,  # a pair for each of the seven
    "vit-l": 1 + 6,  # the patches
    "whisper-small": 2 + 6 + 10,  # convolutions; an encoder's layer; a decoder's, which has two
    "resnet50": 1 + 2 * 4,  # the stem; two blocks of three with a shortcut each
    "small-gpt": 6,
    "small-cnn": 1 + 2 * 4,
}
LAYOUTS = [(name, False) for name in networks.KINDS] + [("resnet50", True)]


def built(name, channels_last=False):
    network = networks.build(
        name, torch.device("cpu"), tiny=True, dtype=torch.float64, channels_last=channels_last
    )
    network.loss().backward()
    return network.model


@pytest.mark.parametrize(("name", "channels_last"), LAYOUTS)
def test_a_round_of_every_model(name, channels_last, tmp_path, capsys):
    words = [name, "--tiny", "--rounds", "1", "--json", str(tmp_path / "figures.json")]
    models.run(models.arguments(words + ["--channels-last"] * channels_last))
    printed = capsys.readouterr().out
    assert "/ AdamW" in printed and "Muon.for_model, bfloat16" in printed
    (result,) = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert sum(count for count, _, _ in result["matrices"]) == MATRICES[name]
    matrices = sum(count * m * n for count, m, n in result["matrices"])
    assert matrices + result["rest"]["entries"] == result["trained"]
    times = {k: v["milliseconds"] for k, v in result["methods"].items()}
    assert len(times) == 7 and all(value > 0 for value in times.values())
    same = result["ratios"]["same blocks"]
    assert same["ratio"] == times["Leon.for_model"] / times[same["of"]]


def test_what_the_average_costs(tmp_path, capsys):
    words = ["gpt2", "--tiny", "--rounds", "1", "--average", "0.1"]
    result = models.run(models.arguments(words))
    times = {k: v["milliseconds"] for k, v in result["methods"].items()}
    assert len(times) == 4
    for row in result["ratios"].values():
        assert row["ratio"] == times[row["step"]] / times[row["of"]]
    assert "with an average / Muon.for_model: " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "channels_last"), LAYOUTS)
def test_both_sides_step_the_same_blocks(name, channels_last):
    """The copies step as the blocks of `for_model`, cut as before."""
    model = built(name, channels_last)
    optimizer = nucleon.Leon.for_model(model)
    parts = models.divided(optimizer)
    assert all(m.is_contiguous() and m.grad.is_contiguous() for m in parts.matrices)
    before = [m.detach().clone() for m in parts.matrices]
    optimizer.step()
    nucleon.Leon(parts.matrices).step()
    for old, one, other in zip(
        before, parts.matrices, models.divided(optimizer).matrices, strict=True
    ):
        assert not torch.equal(old, one)
        # float64 products of 64 numbers near 1, in two orders, times the slope of the quintics.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_moved_gradients_have_new_addresses_and_old_values():
    params = [p for p in built("gpt2").parameters() if p.grad is not None]
    before = [p.grad for p in params]
    models.move_gradients(params)
    old = {g.data_ptr() for g in before}
    assert not any(p.grad.data_ptr() in old for p in params)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "moe", "lora", "resnet50"])
def test_the_report_counts_the_state(name):
    """As it is after a step, without the counters."""
    network = networks.build(name, torch.device("cpu"), tiny=True)
    network.loss().backward()
    params = [p for p in network.model.parameters() if p.grad is not None]
    optimizers = {
        models_report.LEON: nucleon.Leon.for_model(network.model),
        models_report.MUON: nucleon.Muon.for_model(network.model),
        models_report.ADAMW: torch.optim.AdamW(params),
    }
    parts = models.divided(optimizers[models_report.LEON])
    counted = models_report.state_bytes(models.facts(network, parts, 1.0))
    for which, optimizer in optimizers.items():
        optimizer.step()
        state = (x for own in optimizer.state.values() for k, x in own.items() if k != "step")
        kept = sum(x.nbytes for x in state if torch.is_tensor(x) and x.is_floating_point())
        assert kept == counted[which], which


def test_the_report_draws_what_was_measured(tmp_path, monkeypatch, capsys):
    path = tmp_path / "gpt2.json"
    words = ["gpt2", "--tiny", "--rounds", "1", "--json", str(path)]
    times = models.run(models.arguments(words))["methods"]
    monkeypatch.setattr(sys, "argv", ["models_report.py", str(path)])
    capsys.readouterr()
    models_report.main()
    head, _, row, *_ = (x for x in capsys.readouterr().out.splitlines() if x.startswith("|"))
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["| ms per step"] == "| gpt2, tiny, 0 M"
    shown = models_report.digits(times["Leon.for_model"]["milliseconds"])
    assert cells["Leon"] == shown and float(shown) > 0
