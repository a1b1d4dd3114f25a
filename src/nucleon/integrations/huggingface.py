"""Hugging Face Trainer: a factory for its `optimizer_cls_and_kwargs`, and a callback that logs."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from nucleon import _checks
from nucleon.integrations.quantities import quantities
from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.registry import create


def factory(name: str) -> type:
    """Return a factory for `Trainer(optimizer_cls_and_kwargs=(factory("leon"), options))`.

    The Trainer (transformers 5 and later) instantiates what is not a torch optimizer class and
    calls it with its model, so that the parameters are routed by module. With an earlier one build
    the optimizer yourself and pass `optimizers=(optimizer, None)`. The options are those of
    `for_model`. The Trainer passes none of its arguments on, so `lr` and `weight_decay` must be
    among the options; the schedule is the Trainer's.

    Args:
        name: an optimizer of `nucleon.optim.OPTIMIZERS`.
    """

    class Factory:
        def __call__(self, model: nn.Module, *arguments: object, **options: Any) -> Optimizer:
            # axolotl passes its TrainingArguments too; one rule serves both.
            if missing := [each for each in ("lr", "weight_decay") if each not in options]:
                raise ValueError(
                    f"the options lack {' and '.join(missing)}: learning_rate and weight_decay of "
                    f"TrainingArguments do not reach this optimizer; pass optimizer_cls_and_kwargs="
                    f'(factory("{name}"), {{"lr": 0.02, "weight_decay": 0.0}}), and "aux_lr" for '
                    f"the parameters of AdamW"
                )
            return create(name, model, **options)

    Factory.__name__ = Factory.__qualname__ = f"{name.capitalize()}Factory"
    return Factory


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
