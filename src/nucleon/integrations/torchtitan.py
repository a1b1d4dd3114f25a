"""torchtitan: its container of optimizers, with Muon, Pion or Leon for each part of the model.

    --override.imports 'nucleon.integrations.torchtitan.leon={"lr": 0.02, "placement": "owner"}'

The options of the override are those of `for_model`, and concern the matrices. Parameters of AdamW
keep the options of the run's configuration, pattern by pattern, completed by the defaults of
torch's AdamW; `aux_lr` and `aux` of the override come first. torchtitan's schedule multiplies all
rates.

With `average` among the options, two more overrides validate the average W̄ and save it as the last
model. Checkpoints keep the raw weights, with W̄ in the state of the optimizer:

    --override.imports 'nucleon.integrations.torchtitan.averaged_validation'
    --override.imports 'nucleon.integrations.torchtitan.averaged_model'
"""

# pyright: basic, reportMissingImports=false
# torchtitan is not installed where the types are checked.

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.config import TORCH_DTYPE_MAP, derive, override

from nucleon.optim.base import MatrixOptimizer
from nucleon.optim.options import ADAMW_DEFAULTS
from nucleon.optim.registry import create
from nucleon.optim.routing.routing import param_groups

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""States by parameter, so that stages of a pipeline can be cut and joined."""
_IMPLEMENTATION = ("fused", "foreach", "capturable")
"""Options that choose an implementation of torch's AdamW; nucleon has one."""
_OPTIMIZERS: WeakKeyDictionary[nn.Module, MatrixOptimizer] = WeakKeyDictionary()
"""The optimizer of each part of a model."""


class MatrixOptimizers(OptimizersContainer[Optimizer]):
    """An optimizer of `nucleon.create` for each part of the model.

    Args:
        config: the method, its options, and AdamW's parameter groups.
        model_parts: the model, or the stages of a pipeline on this rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Options; torchtitan's `param_groups` concern the parameters of AdamW."""

        method: str = "leon"
        """An optimizer of `nucleon.optim.OPTIMIZERS`."""
        options: dict[str, Any] = field(default_factory=dict)
        """Options of `for_model`; dtypes by their names, as "bfloat16"."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [create(config.method, m, **_options(config, m)) for m in model_parts]
        for index, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:  # a flat state repeats them for each parameter
                group.pop("param_names", None)
            self._log_optimizer(optimizer, index, [g["route"] for g in optimizer.param_groups])
            if isinstance(optimizer, MatrixOptimizer):
                _OPTIMIZERS[model_parts[index]] = optimizer
        # The container is an optimizer too, for the sake of the hooks of a step.
        params = [p for each in self.optimizers for g in each.param_groups for p in g["params"]]
        Optimizer.__init__(self, params, {})

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all parts, flat, by the names of their parameters."""
        states: dict[str, Any] = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            states |= get_optimizer_state_dict(part, optimizer, options=_FLAT)
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into each part its parameters of a flat state."""
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, optimizer, state_dict, options=_FLAT)


@contextmanager
def averaged(model_parts: Sequence[nn.Module]) -> Iterator[None]:
    """Make all parts of a model the average W̄ inside a block, see `MatrixOptimizer.averaged`."""
    with ExitStack() as stack:
        for part in model_parts:
            optimizer = _OPTIMIZERS.get(part)
            if optimizer is None:
                raise RuntimeError(
                    "no optimizer of Muon, Pion or Leon keeps an average; add the override "
                    "'nucleon.integrations.torchtitan.muon={\"average\": 0.1}'"
                )
            stack.enter_context(optimizer.averaged())
        yield


class AveragedValidator(Validator):
    """torchtitan's validation, of the average W̄."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Options of torchtitan's validation."""

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate W̄."""
        with averaged(model_parts):
            super().validate(model_parts, step)


class AveragedCheckpoints(CheckpointManager):
    """torchtitan's checkpoints; a last one of the model alone is the average W̄."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Options of torchtitan's checkpoints."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], **options: Any) -> None:
        super().__init__(config, model_parts=model_parts, **options)
        self.model_parts = model_parts

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not (last_step and self.last_save_model_only):
            return super()._save(curr_step, last_step)
        with averaged(self.model_parts):
            return super()._save(curr_step, last_step)


def _options(config: MatrixOptimizers.Config, part: nn.Module) -> dict[str, Any]:
    """Return the arguments of `for_model`: the options, and those of torchtitan's AdamW."""
    if config.implementation == "fused_opt_states_bf16":
        raise ValueError(
            "optimizer.implementation is 'fused_opt_states_bf16', but AdamW's moments are float32 "
            "here; write 'fused', and momentum_dtype='bfloat16' for the matrices"
        )
    options = {
        name: TORCH_DTYPE_MAP.get(value, value) if name.endswith("_dtype") else value
        for name, value in config.options.items()
    }
    if getattr(part, "lm_head", part) is None:  # a stage of a pipeline without the head
        options.setdefault("head", None)
    routing = {name: options[name] for name in ("head", "overrides") if name in options}
    explicit = {**(options.get("aux") or {})}
    explicit |= {"lr": options["aux_lr"]} if "aux_lr" in options else {}
    patterns = _patterns(config)
    values = {
        param: _first_match(name, patterns) | explicit
        for group in param_groups(part, **routing)
        if group["route"] == "adamw"
        for name, param in group["params"]
    }

    def override(name: str, module: nn.Module, param: Tensor) -> dict[str, Any] | None:
        return values.get(param)

    return {**options, "overrides": (override, options.get("overrides") or {})}


def _patterns(config: MatrixOptimizers.Config) -> list[tuple[str, dict[str, Any]]]:
    """Return each pattern of Adam and AdamW with all its options.

    Patterns of other optimizers concern the matrices, whose options are those of the override.
    """
    patterns: list[tuple[str, dict[str, Any]]] = []
    for group in config.param_groups:
        if (kind := group.optimizer_name) not in ("Adam", "AdamW"):
            continue
        defaults = getattr(torch.optim, kind)([torch.empty(0)]).defaults
        configured = config.optimizer_factory_kwargs_by_name.get(kind, {}) | group.optimizer_kwargs
        relevant = {name: x for name, x in configured.items() if name not in _IMPLEMENTATION}
        complete = {name: defaults[name] for name in ADAMW_DEFAULTS} | relevant
        if kind == "Adam" and complete["weight_decay"]:
            raise ValueError(
                f"the pattern {group.pattern!r} of optimizer.param_groups has Adam with "
                f"weight_decay={complete['weight_decay']}, which Adam adds to the gradient; only "
                f"decoupled decay is available: write optimizer_name='AdamW', or weight_decay=0"
            )
        patterns.append((group.pattern, complete))
    return patterns


def _first_match(name: str, patterns: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the options of the first pattern that matches a name."""
    first = next((options for pattern, options in patterns if re.search(pattern, name)), None)
    if first is None and patterns:
        raise ValueError(
            f"{name} goes to AdamW, but no pattern of AdamW in optimizer.param_groups matches it; "
            f"add a last ParamGroupConfig(pattern='.*', optimizer_name='AdamW', …)"
        )
    return first or {}


@override(target=OptimizersContainer.Config, description="matrices by Leon, the rest by AdamW")
def leon(config: OptimizersContainer.Config, **options: Any) -> MatrixOptimizers.Config:
    """Replace the run's optimizer by `nucleon.Leon`."""
    return derive(config, MatrixOptimizers.Config, method="leon", options=options)


@override(target=OptimizersContainer.Config, description="matrices by Muon, the rest by AdamW")
def muon(config: OptimizersContainer.Config, **options: Any) -> MatrixOptimizers.Config:
    """Replace the run's optimizer by `nucleon.Muon`."""
    return derive(config, MatrixOptimizers.Config, method="muon", options=options)


@override(target=OptimizersContainer.Config, description="matrices by Pion, the rest by AdamW")
def pion(config: OptimizersContainer.Config, **options: Any) -> MatrixOptimizers.Config:
    """Replace the run's optimizer by `nucleon.Pion`."""
    return derive(config, MatrixOptimizers.Config, method="pion", options=options)


@override(target=Validator.Config, description="validate the average of the weights")
def averaged_validation(config: Validator.Config) -> AveragedValidator.Config:
    """Replace the run's validator by `AveragedValidator`."""
    return derive(config, AveragedValidator.Config)


@override(target=CheckpointManager.Config, description="the last model is the average")
def averaged_model(config: CheckpointManager.Config) -> AveragedCheckpoints.Config:
    """Replace the run's checkpoints by `AveragedCheckpoints`."""
    return derive(config, AveragedCheckpoints.Config)
