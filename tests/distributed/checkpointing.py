"""Programs of the ranks in the tests of checkpoints: steps, saved and loaded in between."""

import dataclasses
import io
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import MAKE, SHAPES, gradient_of, mesh_of, place, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nucleon.optim import consolidate


class Weights(nn.Module):
    """Matrices, a stack and a vector; gradients are put there by hand."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.full(shape, 0.5, dtype=dtype)))
        self.bias = nn.Parameter(torch.full((5,), 0.5, dtype=dtype))

    def forward(self):
        return sum(p.sum() for p in self.parameters())


def spread(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    size = dist.get_world_size() if kind != "alone" else 1
    if kind == "fsdp":
        fully_shard(model, mesh=mesh_of(size))
    if kind == "twice":  # along their rows, by tensor parallelism and FSDP2
        mesh = mesh_of(2, size // 2)
        for name, p in list(model.named_parameters()):
            cut = distribute_tensor(p.detach(), mesh["inner"], [Shard(0)])
            model.register_parameter(name, nn.Parameter(cut))
        fully_shard(model, mesh=mesh["outer"])
    if kind == "hsdp":
        fully_shard(model, mesh=mesh_of(2, size // 2))
    return model


def make(model, placement, method="leon", **options):
    named = dict(model.named_parameters())
    first = ("tall", "odd")
    groups = [
        {"params": [(n, named[n]) for n in SHAPES if (n in first) is chosen]}
        for chosen in (True, False)
    ]
    groups.append({"params": [("bias", named["bias"])], "route": "adamw", "lr": 1e-2})
    return MAKE[method](groups, lr=0.05, weight_decay=0.1, placement=placement, **options)


def go(model, optimizer, start, stop):
    for step in range(start, stop):
        for name, p in model.named_parameters():
            gradient = gradient_of("tall" if name == "bias" else name, step, p.dtype)
            gradient = gradient[0] if name == "bias" else gradient
            if hasattr(p, "device_mesh"):
                gradient = place(gradient, p.device_mesh, p.placements)
            p.grad = gradient
        optimizer.step()


def flat_options(through):
    return StateDictOptions(flatten_optimizer_state_dict=through == "flat")


def save(folder, through, model, called, optimizer):
    if through == "file":
        weights = {n: whole(p) for n, p in model.named_parameters()}
        state = consolidate(optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save({"model": weights, "optimizer": state}, Path(folder) / "state.pt")
        else:
            assert state == {}
        return
    state = get_optimizer_state_dict(called, optimizer, options=flat_options(through))
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)


def load(folder, through, model, called, optimizer):
    if through == "file":
        found = torch.load(Path(folder) / "state.pt", weights_only=True)
        for name, p in model.named_parameters():
            value = found["model"][name]
            with torch.no_grad():
                if hasattr(p, "device_mesh"):
                    value = place(value, p.device_mesh, p.placements)
                p.copy_(value)
        optimizer.load_state_dict(found["optimizer"])
        return
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(called, optimizer, options=flat_options(through)),
    }
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(called, optimizer, state["optimizer"], options=flat_options(through))


def resumable(
    kind,
    placement,
    folder,
    through="tree",
    loads=False,
    start=0,
    saves_at=None,
    stop=4,
    dtype=torch.float32,
    method="leon",
    **options,
):
    """Steps `start`…`stop`, from a checkpoint if it `loads`; `saves_at` is the step of another."""
    model = Weights(dtype)
    called = spread(model, kind)
    optimizer = make(model, placement, method, **options)
    if loads:
        load(folder, through, model, called, optimizer)
    if saves_at is not None:
        go(model, optimizer, start, saves_at)
        save(folder, through, model, called, optimizer)
        start = saves_at
    go(model, optimizer, start, stop)
    raw = {n: whole(p) for n, p in model.named_parameters()}
    if options.get("average") is None:
        return raw
    with optimizer.averaged():
        averages = {f"average of {n}": whole(p) for n, p in model.named_parameters()}
    again = {f"again {n}": whole(p) for n, p in model.named_parameters()}
    return raw | averages | again


def whole_state(kind, placement, dtype=torch.float64):
    """After three steps: the weights aside, the state that `consolidate` returns, and its bytes."""
    model = Weights(dtype)
    spread(model, kind)
    optimizer = make(model, placement)
    go(model, optimizer, 0, 3)
    state = consolidate(optimizer)
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def figures(kind, placement, certify=False):
    """Diagnostics and certificates after three steps, as plain numbers."""
    model = Weights(torch.float64)
    spread(model, kind)
    optimizer = make(model, placement, certify=certify, gradient_bound=4.0)
    go(model, optimizer, 0, 3)
    found = {
        name: {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in fields.items()}
        for name, c in optimizer.certificates().items()
        for fields in [dataclasses.asdict(c)]
    }
    return optimizer.diagnostics(), found


def half_a_state(folder):
    """A rank's own state, saved by itself, does not go into an optimizer that owns more."""
    model = Weights()
    optimizer = make(spread(model, "ddp").module, "owner")
    state = optimizer.state_dict()
    alone = make(Weights(), "local")
    before = alone.state_dict()
    try:
        alone.load_state_dict(state)
    finally:
        after = alone.state_dict()
        assert before["param_groups"] == after["param_groups"]


def full_state(kind, placement, resumed, certify=False, used=False):
    """torch's own way to the whole state, taken after two steps, and loaded in the same way.

    `used`: into an optimizer that has stepped before.
    """
    model, options = Weights(torch.float64), StateDictOptions(full_state_dict=True)
    called = spread(model, kind)
    asked = {"certify": certify, "gradient_bound": 9.0 * certify}
    optimizer = make(model, placement, **asked)
    go(model, optimizer, 0, 2)
    state = get_optimizer_state_dict(called, optimizer, options=options)
    fresh = make(model, resumed, **asked)
    if used:
        kept = [p.detach().clone() for p in model.parameters()]
        go(model, fresh, 5, 6)
        with torch.no_grad():
            for p, old in zip(model.parameters(), kept, strict=True):
                p.copy_(old)
    set_optimizer_state_dict(called, fresh, state, options=options)
    go(model, fresh, 2, 4)
    assert all(c.refusal is None for c in fresh.certificates().values())
    return {n: whole(p) for n, p in model.named_parameters()}
