"""Hugging Face Trainer: a factory for its `optimizer_cls_and_kwargs`, and two callbacks.

`AverageCallback` evaluates and saves the average of the weights, `DiagnosticsCallback` logs.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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

    The Trainer (transformers 5 and later) calls an instance of the factory with its model, so that
    the parameters are routed by module. With an earlier version, build the optimizer yourself and
    pass `optimizers=(optimizer, None)`. The options are those of `for_model`. The Trainer does not
    pass its arguments on, so the options must contain `lr` and `weight_decay`. The schedule is the
    Trainer's.

    Args:
        name: an optimizer of `nucleon.optim.OPTIMIZERS`.
    """

    class Factory:
        def __call__(self, model: nn.Module, *arguments: object, **options: Any) -> Optimizer:
            # `arguments` are the TrainingArguments, which axolotl passes and the Trainer does not.
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


class AverageCallback(TrainerCallback):
    """Evaluate and save the average W̄: `trainer.add_callback(AverageCallback(trainer))`.

    The optimizer must keep an average, for example by {"average": 0.1} among the options of
    `factory`. `evaluate` and `predict` run with W̄, during and after the training. A checkpoint
    contains the raw weights, from which a run is resumed; W̄ is saved in its folder
    "checkpoint-…/average". At the end W̄ is saved in "average" of the output directory. Load both by
    `from_pretrained`.

    Args:
        trainer: its optimizer is Muon, Pion or Leon, and `load_best_model_at_end` is False, since
            it would load raw weights.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True would load raw weights where the average was "
                "evaluated; pass False, and load trainer.state.best_model_checkpoint + '/average'"
            )
        self.trainer = trainer
        loop = trainer.evaluation_loop

        def averaged_loop(*arguments: Any, **options: Any) -> Any:
            with self._averaged():
                return loop(*arguments, **options)

        trainer.evaluation_loop = averaged_loop

    def _averaged(self) -> AbstractContextManager[None]:
        optimizer = _matrix_optimizer(self.trainer)
        return nullcontext() if optimizer is None else optimizer.averaged()

    def _save(self, folder: Path) -> None:
        with self._averaged():
            self.trainer.save_model(str(folder / "average"), _internal_call=True)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save W̄ beside the checkpoint."""
        self._save(Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save W̄ of the whole run."""
        self._save(Path(args.output_dir or "."))


def _matrix_optimizer(trainer: Trainer) -> MatrixOptimizer | None:
    """Return the optimizer of a Trainer, unwrapped from accelerate, if it is a MatrixOptimizer."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return optimizer if isinstance(optimizer, MatrixOptimizer) else None


class DiagnosticsCallback(TrainerCallback):
    """Log the optimizer every N steps: `trainer.add_callback(DiagnosticsCallback(trainer))`.

    The `nucleon.integrations.quantities` go to every logger of the Trainer: TensorBoard, Weights &
    Biases and others.

    Args:
        trainer: its optimizer is Muon, Pion or Leon; for any other nothing is logged.
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
        optimizer = _matrix_optimizer(self.trainer)
        if state.global_step % self.every or optimizer is None:
            return
        due = control.should_log  # `log` clears it, though the loss is still to be logged
        self.trainer.log(quantities(optimizer))
        control.should_log = due
