import copy
import math

import pytest
import torch
from torch import nn

import nucleon
from helpers_states import differences
from nucleon._naming import named
from nucleon.optim import registry
from nucleon.training import (
    GPT,
    MLP,
    GPTConfig,
    Nobody,
    Recipe,
    evaluate,
    loss,
    make_optimizer,
    optimizer_names,
    restore,
    snapshot,
    text,
    train,
)
from nucleon.training.optimizers import routes

DATA = text("the quick brown fox jumps over the lazy dog. " * 20, context=8)
CONFIG = GPTConfig(DATA.tokenizer.size, context=8, layers=1, heads=2, width=16, dropout=0.2)


def batches(i):
    return DATA.batch(i, 4, seed=0)


def held_out():
    return DATA.held_out(16)


class Notes(Nobody):
    """Writes everything down, keeps snapshots, stops after so many steps."""

    def __init__(self, model=None, optimizer=None, stop_after=math.inf):
        self.model, self.optimizer, self.stop_after = model, optimizer, stop_after
        self.records, self.saved, self.steps = [], {}, 0

    def record(self, record):
        self.records.append(dict(record))

    def save(self, done):
        self.saved[done] = self.model and copy.deepcopy(snapshot(self.model, self.optimizer))

    def stepped(self, done):
        self.steps = done

    def stop(self):
        return self.steps >= self.stop_after


def fresh(name="sgd", seed=0, **options):
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    return model, make_optimizer(name, model, **options)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ------------------------------------------------------------------ schedule


def test_schedules_at_their_ends_and_in_between():
    constant = Recipe(10, warmup=4)
    assert [constant.rate(t) for t in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = Recipe(10, schedule="linear", warmup=5)
    assert [linear.rate(t) for t in range(5, 10)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    cosine = Recipe(8, schedule="cosine")
    assert [cosine.rate(t) for t in range(8)] == pytest.approx(
        [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]
    )
    assert Recipe(4, schedule="cosine", warmup=4).rate(3) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps must be"),
        ({"warmup": 11}, "warmup must be at most steps = 10"),
        ({"schedule": "step"}, "schedule must be one of"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"clip": -1.0}, "clip must be"),
        ({"accumulate": 0}, "accumulate must be"),
    ],
)
def test_bad_recipes_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Recipe(**{"steps": 10, **change})


# ------------------------------------------------------------------ the loop against plain torch


def test_the_loop_is_the_loop_everyone_writes():
    """Clipping, accumulation and a schedule, against a loop of its own with torch's scheduler."""
    model, optimizer = fresh("adamw", lr=0.01)
    mine = copy.deepcopy(model)
    recipe = Recipe(7, schedule="linear", clip=0.5, accumulate=3, log_every=1)
    notes = Notes()
    torch.manual_seed(5)
    assert train(model, optimizer, batches, recipe, watcher=notes) == 7

    torch.manual_seed(5)
    mine.train()
    theirs = torch.optim.AdamW(mine.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(theirs, 1.0, 0.0, total_iters=7)
    for t in range(7):
        theirs.zero_grad()
        losses = [loss(mine, *batches(3 * t + i)) for i in range(3)]
        (sum(losses) / 3).backward()
        norm = nn.utils.clip_grad_norm_(mine.parameters(), 0.5)
        found = notes.records[t]
        assert found["step"] == t + 1
        # Sums of three in another order: a few units in the last place of float32.
        assert found["loss"] == pytest.approx(sum(x.item() for x in losses) / 3, rel=1e-5)
        assert found["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert found["lr"] == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9)
        theirs.step()
        scheduler.step()
    # Rounding of the gradients by 1e-7 moves an AdamW step of 0.01 by about 1e-9 for each, and
    # where a gradient is itself of that size by up to 0.01: only tiny ones are.
    assert (weights(model) - weights(mine)).abs().quantile(0.99) < 1e-5


def test_clipping_is_off_at_zero_and_bounds_the_norm_else():
    moved = {}
    for clip in (0.0, 1e-3, 1e6):
        model, optimizer = fresh("sgd", lr=1.0)
        before = weights(model)
        train(model, optimizer, batches, Recipe(1, clip=clip))
        moved[clip] = (weights(model) - before).norm().item()
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert moved[0.0] == pytest.approx(moved[1e6], rel=1e-6)
    assert moved[0.0] > 0.1


def test_a_gradient_that_is_not_finite_is_not_spread_when_nothing_is_clipped():
    model, optimizer = fresh("leon")
    inputs, targets = batches(0)

    class Poisoned(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            logits = self.model(x)
            logits.register_hook(lambda g: g * math.inf)
            return logits

    before = [p.detach().clone() for p in model.blocks[0].attention.parameters()]
    train(Poisoned(), optimizer, lambda _: (inputs, targets), Recipe(1))
    after = model.blocks[0].attention.parameters()
    assert all(map(torch.equal, before, after))  # Leon skips them


def test_evaluation_is_by_hand_leaves_no_trace_and_ignores_dropout():
    model, _ = fresh()
    model.train()
    state = torch.get_rng_state()
    found = evaluate(model, held_out())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    model.eval()
    inputs, targets = (torch.cat(part) for part in zip(*held_out(), strict=True))
    logits = model(inputs).double()
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert found["test_loss"] == pytest.approx(by_hand.item(), rel=1e-6)
    assert found["accuracy"] == (logits.argmax(-1) == targets).double().mean().item()


def test_records_evaluations_and_checkpoints_come_when_they_are_due():
    model, optimizer = fresh()
    recipe = Recipe(10, log_every=4, evaluate_every=3, save_every=5)
    notes = Notes(model, optimizer)
    train(model, optimizer, batches, recipe, held_out=held_out, watcher=notes)
    assert [r["step"] for r in notes.records if "loss" in r] == [4, 8, 10]
    assert [r["step"] for r in notes.records if "test_loss" in r] == [3, 6, 9, 10]
    assert list(notes.saved) == [5, 10]


def test_a_run_that_is_stopped_saves_first_and_once():
    for stop_after, saved in ((3, [2, 3]), (4, [2, 4])):
        model, optimizer = fresh()
        notes = Notes(model, optimizer, stop_after)
        done = train(model, optimizer, batches, Recipe(10, save_every=2), watcher=notes)
        assert done == stop_after
        assert list(notes.saved) == saved


def test_bf16_computes_in_bf16_and_keeps_the_weights():
    seen = []
    model, optimizer = fresh("leon")
    model.head.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    train(model, optimizer, batches, Recipe(2, precision="bf16"), held_out=held_out)
    assert set(seen) == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in model.parameters())


# ------------------------------------------------------------------ going on


@pytest.mark.parametrize("name", ["leon", "muon", "pion", "adamw", "sgd", "rmsprop"])
def test_going_on_from_any_step_is_as_if_never_stopped(name):
    """Bit for bit: weights, state and records, with dropout drawing from torch's generator."""
    recipe = Recipe(
        9, schedule="cosine", warmup=2, accumulate=2, clip=1.0, log_every=1, save_every=1
    )
    model, optimizer = fresh(name)
    whole = Notes(model, optimizer)
    train(model, optimizer, batches, recipe, held_out=held_out, watcher=whole)
    for cut in (1, 4, 8):
        other, again = fresh(name, seed=99)
        restore(whole.saved[cut], other, again)
        notes = Notes(other, again)
        train(other, again, batches, recipe, held_out=held_out, watcher=notes, start=cut)
        assert notes.records == [r for r in whole.records if r["step"] > cut]
        assert torch.equal(weights(other), weights(model))
        assert differences(notes.saved[9], whole.saved[9]) == []


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_learns(name):
    model, optimizer = fresh(name)
    before = evaluate(model, held_out())["test_loss"]
    train(model, optimizer, batches, Recipe(40))
    # Rprop's and Adadelta's usual rates are others; that they go down at all is enough here.
    assert evaluate(model, held_out())["test_loss"] < before


def test_hidden_matrices_go_to_the_method_and_all_else_to_adamw():
    torch.manual_seed(0)
    for tied in (False, True):
        model = GPT(GPTConfig(vocabulary=7, layers=2, heads=1, width=8, tied=tied))
        groups = make_optimizer("leon", model, lr=0.5, aux_lr=0.25).param_groups
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        assert len(rates) == sum(len(g["params"]) for g in groups)  # each once
        for name, param in model.named_parameters():
            hidden = name.startswith("blocks") and "norm" not in name
            assert rates.pop(id(param)) == (0.5 if hidden else 0.25), name
        assert not rates
    mlp = MLP()
    groups = make_optimizer("muon", mlp, lr=0.5).param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert [n for n, p in mlp.named_parameters() if rates[id(p)] == 0.5] == [
        "hidden.0.weight",
        "hidden.1.weight",
    ]


def test_an_unknown_optimizer_or_a_second_rate_is_refused():
    model = MLP()
    with pytest.raises(ValueError, match=r"no optimizer 'lean'; did you mean leon"):
        make_optimizer("lean", model)
    with pytest.raises(ValueError, match="one rate for all"):
        make_optimizer("adamw", model, aux_lr=0.1)


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_rates_that_are_not_said_are_those_of_for_model(tmp_path, monkeypatch):
    """Of a method of one's own too, by its name or its address, as of nucleon.create."""
    path = tmp_path / "mine.py"
    path.write_text("import nucleon\nclass Soft(nucleon.Leon):\n    pass\n")
    soft = named(f"{path}:Soft")
    monkeypatch.setitem(registry.OPTIMIZERS, "soft", soft.for_model)
    expected = rates(soft.for_model(MLP()))
    assert expected == [0.02, 1e-3] == rates(nucleon.create("soft", MLP()))
    for name in ("soft", f"{path}:Soft", "leon", "muon", "pion"):
        assert rates(make_optimizer(name, MLP())) == expected
        assert rates(make_optimizer(name, MLP(), lr=0.5)) == [0.5, 1e-3]
    assert rates(make_optimizer("sgd", MLP())) == [0.1]
    assert rates(make_optimizer("adam", MLP())) == [3e-3]


def test_an_optimizer_of_ones_own_is_taken_by_its_address(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, nucleon\n"
        "class Mine(nucleon.Leon):\n    pass\n"
        "class Plain(torch.optim.SGD):\n    pass\n"
    )
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    routed = make_optimizer(f"{path}:Mine", model, lr=0.1, seed=3)
    assert type(routed).__name__ == "Mine" and isinstance(routed, nucleon.Leon)
    plain = make_optimizer(f"{path}:Plain", model, lr=0.1)
    assert type(plain).__name__ == "Plain" and len(plain.param_groups[0]["params"]) == 4
    assert routes(f"{path}:Mine") and not routes(f"{path}:Plain")
    with pytest.raises(ValueError, match="one rate"):
        make_optimizer(f"{path}:Plain", model, aux_lr=0.1)
    for missing in ("Absent", "Mine "):
        with pytest.raises(ValueError, match=r"imported|no optimizer"):
            make_optimizer(f"{path}:{missing}", model)
