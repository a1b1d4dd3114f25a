"""A small transformer, whole or cut into the stages of a pipeline, on prescribed gradients."""

import zlib

import torch
from cases import MAKE
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 4, 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Layer(nn.Module):
    """Fused projections, a wide and a tall matrix, and what AdamW takes."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


class Stage(nn.Module):
    """Layers under the names that they have in the whole model; the ends have more."""

    def __init__(self, first=0, last=LAYERS, of=LAYERS):
        super().__init__()
        if first == 0:
            self.tokens = nn.Embedding(5, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(first, last)})
        if last == of:
            self.norm = nn.LayerNorm(WIDTH)
        for name, param in self.named_parameters():
            nn.init.normal_(param, std=0.3, generator=generator(name, 0))


def generator(name, step):
    """Return the generator of a parameter, equal in every stage."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))


def plain_name(name):
    for added in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(added, "")
    return name


def go(model, optimizer, start, stop):
    for step in range(start, stop):
        for name, param in model.named_parameters():
            noise = generator(plain_name(name), 1 + step)
            param.grad = torch.randn(param.shape, generator=noise)
        optimizer.step()
    return {plain_name(name): p.detach().clone() for name, p in model.named_parameters()}


def make(method, model, **options):
    return MAKE[method].for_model(model, lr=0.05, aux_lr=1e-2, weight_decay=0.1, **options)


def flat(model, optimizer):
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def wrapped(model, kind):
    """The model as activation checkpointing, the compiler or DDP present it."""
    if kind == "activation checkpointing":
        for name, layer in list(model.layers.items()):
            model.layers[name] = checkpoint_wrapper(layer)
    elif kind == "compiled layers":
        for name, layer in list(model.layers.items()):
            model.layers[name] = torch.compile(layer)
    elif kind == "compiled":
        return torch.compile(model)
    elif kind == "ddp":
        return DistributedDataParallel(model)
    return model


def rewrapped(method, kinds, placement):
    """Saved under each of `kinds` and loaded under the one after it: names and weights."""
    found = []
    for before, after in zip(kinds, (*kinds[1:], kinds[0]), strict=True):
        model = wrapped(Stage(), before)
        optimizer = make(method, model, placement=placement)
        weights = go(model, optimizer, 0, 2)
        state = flat(model, optimizer)
        other = wrapped(Stage(), after)
        with torch.no_grad():
            for name, param in other.named_parameters():
                param.copy_(weights[plain_name(name)])
        resumed = make(method, other, placement=placement)
        set_optimizer_state_dict(other, resumed, state, options=FLAT)
        names = [resumed.infos[p].name for g in resumed.param_groups for p in g["params"]]
        found.append((names, go(other, resumed, 2, 4)))
    return found
