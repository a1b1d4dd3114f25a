"""A converted run goes on with the hyperparameters of the old one, in the terms of the new."""

import pytest
import torch
from torch import nn

import nucleon
from nucleon.optim import converted


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 8))
    return model.double()


def train(model, optimizers, steps=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for optimizer in optimizers:
            optimizer.step()


def pair(model, **more):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    muon = {"lr": 0.005, "momentum": 0.9, "weight_decay": 0.1} | more
    return [
        torch.optim.Muon(matrices, **muon),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.05),
    ]


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_next_steps_are_those_of_torch(adjust, nesterov):
    """Muon of torch goes on as ours: the same way to what its bf16 allows, AdamW exactly."""
    model, twin = network(), network()
    olds, oracles = (pair(m, adjust_lr_fn=adjust, nesterov=nesterov) for m in (model, twin))
    train(model, olds)
    train(twin, oracles)
    made = converted(olds, model, nucleon.Muon.for_model, head=None, method="muon")
    start = [p.detach().clone() for p in model.parameters()]
    train(model, [made.optimizer], seed=1)
    train(twin, oracles, seed=1)
    for p, q, s in zip(model.parameters(), twin.parameters(), start, strict=True):
        if p.ndim == 2:  # bf16 has 8 bits, and each of five iterations rounds some products
            assert torch.linalg.norm(p - q) <= 0.05 * torch.linalg.norm(q - s)
        else:
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def options(group, *names):
    return {name: group[name] for name in names}


def test_muon_and_adamw_keep_every_hyperparameter():
    model = network()
    olds = pair(model, ns_steps=6)
    train(model, olds)
    made = converted(olds, model, nucleon.Leon.for_model, head=None)
    matrix, rest = made.optimizer.param_groups
    assert options(matrix, "lr", "momentum", "weight_decay", "nesterov", "iterations", "scale") == {
        "lr": 0.005,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "nesterov": True,
        "iterations": 6,
        "scale": "spectral",
    }
    assert options(rest, "lr", "betas", "eps", "weight_decay") == {
        "lr": 2e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.05,
    }
    said = [line for group in made.groups for line in group.lines()]
    assert "matrix: 2 parameters of torch.optim.Muon" in said
    assert "  weight_decay 0.1 → weight_decay 0.1" in said
    assert "  ns_steps 6 → iterations 6" in said
    assert "  betas (0.9, 0.95) → betas (0.9, 0.95)" in said
    again = nucleon.Leon.for_model(model, **made.options)
    again.load_state_dict(made.optimizer.state_dict())
    assert [len(g["params"]) for g in again.param_groups] == [2, 4]


def test_matrices_of_adamw_keep_its_rate_at_its_scale():
    model = network()
    old = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.99), weight_decay=0.02)
    train(model, [old])
    made = converted(old, model, nucleon.Leon.for_model)
    matrix = made.optimizer.param_groups[0]
    assert options(matrix, "lr", "momentum", "weight_decay", "scale", "beta2") == {
        "lr": 1e-3,
        "momentum": 0.8,
        "weight_decay": 0.02,
        "scale": "match-adamw",
        "beta2": None,
    }
    assert any("betas[1] 0.99 → none" in line for line in made.groups[0].lines())


def test_what_was_given_wins():
    model = network()
    olds = pair(model)
    train(model, olds)
    given = {"lr": 0.3, "aux_lr": 0.1, "aux": {"eps": 1e-9}, "weight_decay": 0.0}
    made = converted(olds, model, nucleon.Leon.for_model, head=None, **given)
    matrix, rest = made.optimizer.param_groups
    assert (matrix["lr"], matrix["weight_decay"], matrix["momentum"]) == (0.3, 0.0, 0.9)
    assert (rest["lr"], rest["eps"], rest["betas"]) == (0.1, 1e-9, (0.9, 0.95))
    assert "  lr 0.005 → lr 0.3" in made.groups[0].lines()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([network() for _ in range(3)])


def test_groups_that_the_new_routing_mixes_are_kept_apart():
    """AdamW decays embeddings and not norms; both go to AdamW here."""
    model = Deep().double()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    slow = model.blocks[1][0].weight
    old = torch.optim.AdamW(
        [
            {"params": [p for p in decayed if p is not slow], "weight_decay": 0.1},
            {"params": [slow], "weight_decay": 0.3},
            {"params": others, "weight_decay": 0.0},
        ]
    )
    train(model, [old])
    made = converted(old, model, nucleon.Leon.for_model, head=None)
    assert made.options["overrides"] == {
        "blocks.1.0.weight": {"weight_decay": 0.3},
        "embed.weight": {"weight_decay": 0.1},
    }
    wanted = {p: g["weight_decay"] for g in old.param_groups for p in g["params"]}
    for group in made.optimizer.param_groups:
        assert all(wanted[p] == group["weight_decay"] for p in group["params"])


def test_layers_share_a_glob():
    model = Deep().double()
    apart = {block[0].weight for block in model.blocks}
    rest = [p for p in model.parameters() if p not in apart]
    old = torch.optim.AdamW([{"params": rest}, {"params": list(apart), "lr": 0.1}])
    train(model, [old])
    made = converted(old, model, nucleon.Leon.for_model, head=None)
    rates = {p: g["lr"] for g in made.optimizer.param_groups for p in g["params"]}
    assert all(rates[p] == (0.1 if p in apart else 1e-3) for p in model.parameters())
    assert set(made.options["overrides"]) == {"blocks.*.3.weight"}


def test_the_decay_of_sgd_is_the_same_per_step():
    """Coupled, λW is summed by the momentum: lr·λ/(1−β₁) per step, once it has gathered."""
    model = network()
    old = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    train(model, [old])
    made = converted(old, model, nucleon.Leon.for_model, lr=0.02)
    matrix = made.optimizer.param_groups[0]
    assert matrix["lr"] == 0.02 and matrix["momentum"] == 0.9 and matrix["nesterov"] is False
    assert matrix["lr"] * matrix["weight_decay"] == pytest.approx(0.1 * 1e-3 / 0.1, rel=1e-12)
    # The oracle: SGD whose only gradient is the decay.
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    alone = torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=1e-3)
    for _ in range(300):
        before = w.item()
        w.grad = torch.zeros_like(w)
        alone.step()
    measured = 1 - w.item() / before
    # The momentum lags 1/(1−β₁) steps behind a weight that falls by a thousandth per step.
    assert measured == pytest.approx(matrix["lr"] * matrix["weight_decay"], rel=0.02)


def test_a_coupled_decay_of_adam_is_said():
    model = network()
    old = torch.optim.Adam(model.parameters(), weight_decay=1e-4)
    train(model, [old])
    made = converted(old, model, nucleon.Leon.for_model)
    lines = [line for group in made.groups for line in group.lines()]
    assert any("weight_decay 0.0001 → weight_decay 0.0001 (there divided" in s for s in lines)


def test_schedules_find_their_first_rate():
    model = network()
    olds = pair(model)
    for old in olds:
        torch.optim.lr_scheduler.LambdaLR(old, lambda step: 0.5)
    train(model, olds)
    made = converted(
        [o.state_dict() | named(o, model) for o in olds], model, nucleon.Leon.for_model
    )
    assert [g["lr"] for g in made.optimizer.param_groups] == [0.0025, 1e-3]
    assert [g["initial_lr"] for g in made.optimizer.param_groups] == [0.005, 2e-3]


def named(optimizer, model):
    """The saved groups of an optimizer with the names of its parameters."""
    names = {p: name for name, p in model.named_parameters()}
    saved = optimizer.state_dict()["param_groups"]
    pairs = zip(saved, optimizer.param_groups, strict=True)
    return {
        "param_groups": [g | {"param_names": [names[p] for p in own["params"]]} for g, own in pairs]
    }


@pytest.mark.parametrize("to", [nucleon.Muon, nucleon.Leon, nucleon.Pion])
def test_options_of_our_own_are_kept_where_they_mean_the_same(to):
    model = network()
    old = nucleon.Leon.for_model(
        model, lr=0.1, momentum=0.8, smoothing_scale=3.0, beta2=0.9, aux={"eps": 1e-7}, head=None
    )
    train(model, [old])
    new = converted(old, model, to.for_model, head=None).optimizer
    matrix, rest = new.param_groups
    assert (matrix["lr"], matrix["momentum"], rest["eps"]) == (0.1, 0.8, 1e-7)
    if to is not nucleon.Muon:
        assert matrix["beta2"] == 0.9
        assert matrix["smoothing_scale"] == (3.0 if to is nucleon.Leon else "theory")


def test_the_adam_inside_of_muon_of_2024():
    model = network()
    adam = {"adamw_lr_ratio": 0.1, "adamw_betas": (0.9, 0.99), "adamw_eps": 1e-7, "adamw_wd": 0.03}
    shared = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 6}
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    old.param_groups[0] = {"params": old.param_groups[0]["params"], **shared, **adam}
    for p in model.parameters():
        buffers = ["momentum_buffer"] if p.ndim == 2 else ["moment1", "moment2"]
        old.state[p] = {"step": 3, **{name: torch.ones_like(p) for name in buffers}}
    matrix, rest = converted(old, model, nucleon.Leon.for_model, head=None).optimizer.param_groups
    assert (matrix["lr"], matrix["iterations"], matrix["weight_decay"]) == (0.02, 6, 0.0)
    assert options(rest, "betas", "eps", "weight_decay") == {
        "betas": (0.9, 0.99),
        "eps": 1e-7,
        "weight_decay": 0.03,
    }
    assert rest["lr"] == pytest.approx(2e-3, rel=1e-12)
