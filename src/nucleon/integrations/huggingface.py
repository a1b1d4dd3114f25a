"""Hugging Face Trainer: a factory for its `optimizer_cls_and_kwargs`, and a callback that logs."""

import sys
import warnings
from collections.abc import Collection
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from nucleon import _checks
from nucleon.integrations.quantities import quantities
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.inherit import overrides
from nucleon.optim.registry import create


def factory(name: str) -> type:
    """What `Trainer(optimizer_cls_and_kwargs=(factory("leon"), {"lr": 4e-3}))` takes.

    The Trainer (transformers 5 and later) instantiates what is not a torch optimizer class and
    calls it with its model, so that the parameters are routed by module. With an earlier one build
    the optimizer yourself and pass `optimizers=(optimizer, None)`. axolotl calls it with its model
    and its arguments. The learning rates are those given here; the schedule and `weight_decay` are
    those of the `TrainingArguments`, the latter for what the Trainer decays, unless it is given
    here.

    Args:
        name: an optimizer of `nucleon.list_optimizers()`.
    """

    class Factory:
        def __call__(
            self, model: nn.Module, args: TrainingArguments | None = None, /, **options: Any
        ) -> Optimizer:
            # The Trainer hands on none of its arguments, but it is who calls.
            caller = sys._getframe(1).f_locals.get("self")
            trainer = caller if isinstance(caller, Trainer) else None
            args = trainer.args if args is None and trainer is not None else args
            made = create(name, model, **options)
            if not isinstance(made, MatrixOptimizer) or args is None:
                return made
            # What a Trainer decays it reads off the model alone, so none need be there.
            kind = Trainer if trainer is None else type(trainer)
            names = kind.get_decay_parameter_names(cast(Trainer, trainer), model)
            decayed = _decayed(float(args.weight_decay), names, model, made, options)
            if decayed == options:
                return made
            del made  # its state, before there is another
            with warnings.catch_warnings():  # what is doubtful in the model was said above
                warnings.simplefilter("ignore", UserWarning)
                return create(name, model, **decayed)

    Factory.__name__ = Factory.__qualname__ = f"{name.capitalize()}Factory"
    return Factory


def _decayed(
    decay: float,
    names: Collection[str],
    model: nn.Module,
    made: MatrixOptimizer,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The options with the decay of the Trainer for what it decays: no norms, no biases."""
    given = {"matrix": "weight_decay" in options, "adamw": "weight_decay" in options.get("aux", {})}
    if not decay or all(given.values()):
        return options
    named = set(names)
    params = {p for name, p in model.named_parameters() if name in named}
    shared = {"matrix": decay, "adamw": 0.0}
    apart: dict[str, Any] = {}
    for rule in (rule for rule in shared if not given[rule]):
        groups = [group for group in made.param_groups if group["route"] == rule]
        values = {
            param: {"weight_decay": decay if param in params else 0.0}
            for group in groups
            for param in group["params"]
        }
        apart |= overrides(model, values, {"weight_decay": shared[rule]})
    wishes = {**apart, **(options.get("overrides") or {})}
    found = options if given["matrix"] else {**options, "weight_decay": decay}
    return {**found, "overrides": wishes} if wishes else found


class DiagnosticsCallback(TrainerCallback):
    """`trainer.add_callback(DiagnosticsCallback(trainer))` logs the optimizer every N steps.

    It goes to everything that the Trainer reports to, TensorBoard, Weights & Biases and others, see
    `nucleon.integrations.quantities`.

    Args:
        trainer: whose optimizer is Muon, Pion or Leon; of any other nothing is logged.
        every: N (100); each time synchronizes with the device.
    """

    def __init__(self, trainer: Trainer, every: int = 100) -> None:
        self.trainer = trainer
        self.every = _checks.count("every", every)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Log after every N-th step."""
        optimizer = self.trainer.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # as accelerate wraps it
        if state.global_step % self.every or not isinstance(optimizer, MatrixOptimizer):
            return
        due = control.should_log  # which logging ends, though the loss is still to be logged
        self.trainer.log(quantities(optimizer))
        control.should_log = due
