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


class AverageCallback(TrainerCallback):
    """`trainer.add_callback(AverageCallback(trainer))` evaluates and saves the average W̄.

    The optimizer keeps an average: `factory` was given {"average": 0.1} among its options.
    `evaluate` and `predict` run with W̄, during the training and after it. A checkpoint has the raw
    weights, from which alone a run may go on, and W̄ beside them in a model folder of its own,
    "checkpoint-…/average"; at the end W̄ is in "average" of the output directory. Both are loaded by
    `from_pretrained`.

    Args:
        trainer: whose optimizer is Muon, Pion or Leon, and which does not load its best model at
            the end: that would be the raw weights of a checkpoint whose average was the best.
    """

    def __init__(self, trainer: Trainer) -> None:
        if trainer.args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True would load raw weights where the average was "
                "evaluated; pass False, and load trainer.state.best_model_checkpoint + '/average'"
            )
        self.trainer = trainer
        loop = trainer.evaluation_loop

        def averaged_loop(*given: Any, **options: Any) -> Any:
            with self._averaged():
                return loop(*given, **options)

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
    """Return the optimizer of a Trainer, as accelerate wraps it or not, if it is one of ours."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return optimizer if isinstance(optimizer, MatrixOptimizer) else None


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
        optimizer = _matrix_optimizer(self.trainer)
        if state.global_step % self.every or optimizer is None:
            return
        due = control.should_log  # which logging ends, though the loss is still to be logged
        self.trainer.log(quantities(optimizer))
        control.should_log = due
