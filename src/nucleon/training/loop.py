"""One plain training loop: schedule, accumulation, clipping, autocast, evaluation, checkpoints.

Everything that a step needs besides weights, optimizer and torch's generator is a function of its
number: the batch, the learning rate, whether to log, to evaluate or to save. So those three are the
whole state, and a run that goes on from them is the run that was never broken.

Between two records the host does not wait for the device.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nucleon import _checks
from nucleon.training import models
from nucleon.training.clock import Clock
from nucleon.training.data import Batch
from nucleon.training.feed import feed

Schedule = Literal["constant", "cosine", "linear"]
Precision = Literal["float32", "bf16"]

Record = Mapping[str, float]


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Args:
        steps: number of optimizer steps.
        schedule: of the learning rate after the warm-up: "constant", or to zero by half a "cosine"
            or "linear" ("constant").
        warmup: steps over which the rate rises linearly from zero (0).
        clip: largest Euclidean norm of all gradients together; 0 clips nothing (0).
        accumulate: batches a step, whose gradients are averaged (1).
        precision: "float32", the dtype of the weights, or "bf16", autocast ("float32").
        log_every: steps between two records (10).
        evaluate_every: steps between two evaluations; 0 is at the end only (0).
        save_every: steps between two checkpoints; 0 is at the end only (0).
    """

    steps: int
    schedule: Schedule = "constant"
    warmup: int = 0
    clip: float = 0.0
    accumulate: int = 1
    precision: Precision = "float32"
    log_every: int = 10
    evaluate_every: int = 0
    save_every: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every"):
            _checks.count(name, getattr(self, name))
        for name in ("warmup", "evaluate_every", "save_every"):
            _checks.count(name, getattr(self, name), minimum=0)
        _checks.choice("schedule", self.schedule, get_args(Schedule))
        _checks.choice("precision", self.precision, get_args(Precision))
        _checks.nonnegative("clip", self.clip)
        if self.warmup > self.steps:
            raise ValueError(f"warmup must be at most steps = {self.steps}, got {self.warmup}")

    def rate(self, step: int) -> float:
        """The factor on the learning rate at a step: 0, 1, …, steps − 1."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        left = 1 - (step - self.warmup) / max(1, self.steps - self.warmup)
        return left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2

    def due(self, every: int, done: int) -> bool:
        """Whether something that happens `every` so many steps happens after `done` of them."""
        return done == self.steps or (every > 0 and done % every == 0)


class Watcher(Protocol):
    """Is told of a run, may keep its state, and may end it early."""

    def record(self, record: Record) -> None:
        """Take the figures of a step: `step`, `lr`, `loss`, `gradient_norm`, or evaluated ones."""
        ...

    def stepped(self, done: int, /) -> None:
        """So many steps are done."""
        ...

    def save(self, done: int) -> None:
        """Keep the state, which is that after so many steps."""
        ...

    def stop(self) -> bool:
        """Whether to save and return now."""
        ...


class Nobody:
    """Watches nothing, keeps nothing."""

    def record(self, record: Record) -> None:
        """Forget it."""

    def stepped(self, done: int, /) -> None:
        """Do nothing."""

    def save(self, done: int) -> None:
        """Do nothing."""

    def stop(self) -> bool:
        """Never."""
        return False


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Callable[[int], Batch],
    recipe: Recipe,
    *,
    held_out: Callable[[], Iterable[Batch]] | None = None,
    watcher: Watcher | None = None,
    start: int = 0,
    clock: Clock | None = None,
) -> int:
    """Train from step `start` to the end of the recipe, or until the watcher stops it.

    Returns the number of steps done, counted from the very first. The learning rates that the
    optimizer has been made with are those the schedule's factor is applied to.

    Args:
        model: logits from inputs; it is trained where it is.
        optimizer: of its parameters.
        batches: batch i of the training set; step t takes batches t·accumulate, …. On CUDA it is
            called by another thread, one batch ahead.
        recipe: how.
        held_out: what to evaluate on (None: nothing).
        watcher: is told (None: `Nobody`).
        start: steps done before (0).
        clock: measures what share of a step the optimizer takes (None: nothing is measured).
    """
    watcher = watcher or Nobody()
    device = next(model.parameters()).device
    clock = clock or Clock(device)
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
    model.train()
    done, saved, many = start, start, recipe.accumulate
    with closing(feed(batches, start * many, recipe.steps * many, device)) as fed:
        while done < recipe.steps and not watcher.stop():
            some = islice(fed, many)
            loss, norm = _step(model, optimizer, some, recipe, recipe.rate(done), clock)
            done += 1
            if recipe.due(recipe.log_every, done):
                lr = optimizer.param_groups[0]["lr"]
                figures = {"loss": float(loss), "gradient_norm": float(norm)}
                clock.read()
                watcher.record({"step": done, "lr": float(lr), **figures})
            if held_out is not None and recipe.due(recipe.evaluate_every, done):
                watcher.record({"step": done, **evaluate(model, held_out(), recipe.precision)})
            if recipe.due(recipe.save_every, done):
                watcher.save(done)
                saved = done
            watcher.stepped(done)
    if done > saved:
        watcher.save(done)
    return done


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    recipe: Recipe,
    rate: float,
    clock: Clock,
) -> tuple[Tensor, Tensor]:
    """One step; the mean loss of its batches and the norm of the gradient, both on the device."""
    clock.mark()
    optimizer.zero_grad()
    total = torch.zeros((), device=clock.device)
    for inputs, targets in batches:
        with _autocast(clock.device, recipe.precision):
            loss = models.loss(model, inputs, targets) / recipe.accumulate
        loss.backward()
        total += loss.detach()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if recipe.clip:
        nn.utils.clip_grads_with_norm_(model.parameters(), recipe.clip, norm)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * rate
    clock.mark()
    optimizer.step()
    clock.mark()
    return total, norm


def try_out(model: nn.Module, batch: Batch, precision: Precision) -> None:
    """Take the passes of a step and forget the gradients: what they compile is compiled then."""
    device = next(model.parameters()).device
    model.train()
    with _autocast(device, precision):
        loss = models.loss(model, *(tensor.to(device) for tensor in batch))
    loss.backward()
    model.zero_grad()


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[Batch], precision: Precision = "float32"
) -> dict[str, float]:
    """The mean cross-entropy in nats and the share of right answers: `test_loss`, `accuracy`."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    loss, right, count = torch.zeros(3, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        with _autocast(device, precision):
            logits = cast(Tensor, model(inputs.to(device))).flatten(0, -2).float()
        wanted = targets.to(device).flatten()
        loss += nn.functional.cross_entropy(logits, wanted, reduction="sum")
        right += (logits.argmax(dim=-1) == wanted).sum()
        count += len(wanted)
    model.train(training)
    return {"test_loss": float(loss / count), "accuracy": float(right / count)}


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


# ------------------------------------------------------------------ the state of a run


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Weights, optimizer and torch's generators: with the number of steps, all of a run's state."""
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "generator": torch.get_rng_state(),
        "cuda_generators": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Take over what `snapshot` returned."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generator"].cpu())
    if state["cuda_generators"]:
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda_generators"]])
