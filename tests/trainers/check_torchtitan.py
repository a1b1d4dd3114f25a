"""Two ranks: torchtitan saves a run with Leon and goes on from it, cut in other ways too.

    make test-torchtitan
    torchrun --nproc-per-node 2 tests/trainers/check_torchtitan.py

A run of a debug model under FSDP2 with placement="owner" is saved in the middle. Where
the gradients are summed in the same order, the runs that go on from there end with the same
weights bit for bit; under other parallelism their losses agree up to the rounding of gradients.
"""

import dataclasses
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trainers"))
import torchtitan_on_cpu  # noqa: F401  # before torchtitan
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer
from torchtitan_debug import on_numbers, with_leon

from nucleon.integrations.torchtitan import MatrixOptimizers, leon
from nucleon.optim.matrices.parameters import canonical
from nucleon.optim.matrices.shards import full

LAYERS, MIDDLE, STEPS = 2, 2, 4


@dataclasses.dataclass
class Run:
    """Results of a run."""

    losses: dict[int, float]
    start: Mapping[str, torch.Tensor]
    """The weights from which it went on."""
    weights: Mapping[str, torch.Tensor]


@contextmanager
def built(
    folder: str, *, model=llama3_debugmodel, load: int | None = None, ac: bool = True, **given
) -> Iterator[Trainer]:
    """A trainer of two layers, that goes on from a saved step, or saves its own."""
    degrees = {f.name for f in dataclasses.fields(ParallelismConfig)}
    options = {k: x for k, x in given.items() if k not in degrees}
    config = with_leon(on_numbers(model(), folder, STEPS), lr=0.02, **options)
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    for name in degrees & set(given):
        setattr(config.parallelism, name, given[name])
    model_parallel = any(f"{kind}_parallel_degree" in given for kind in ("tensor", "pipeline"))
    config.training.local_batch_size = 8 if model_parallel else 4  # the same batch in all
    if not ac:
        config.activation_checkpoint = None
    saved = config.checkpoint
    saved.enable, saved.interval, saved.last_save_model_only = True, MIDDLE, False
    saved.load_only, saved.load_step = load is not None, -1 if load is None else load
    if "average" in options:
        names = ("averaged_validation", "averaged_model")
        config.override.imports += [f"nucleon.integrations.torchtitan.{name}" for name in names]
        config.validator.enable, config.validator.freq, config.validator.steps = True, STEPS, 1
        saved.last_save_model_only = True
    trainer = config.build()
    assert isinstance(trainer.optimizers, MatrixOptimizers)
    try:
        yield trainer
    finally:
        trainer.close()


def run(folder: str, **given) -> Run:
    """Train to the end, from the beginning or from a saved step."""
    losses: dict[int, float] = {}

    def log(step, loss, *rest, **more):
        losses[step] = loss

    with built(folder, **given) as trainer, mock.patch("time.sleep"):
        trainer.metrics_processor.log = log
        trainer.checkpointer.load(step=given.get("load", -1))
        start = weights(trainer)
        trainer.train()
        return Run(losses, start, weights(trainer))


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the whole weights by their names."""
    named = [pair for part in trainer.model_parts for pair in part.named_parameters()]
    return {canonical(name): full(param.detach()).clone() for name, param in named}


def with_experts(folder: str) -> tuple[Run, Run]:
    """Experts that are divided among the ranks: an unbroken run, and one that was resumed."""
    given = {"model": deepseek_v3_debugmodel, "expert_parallel_degree": 2}
    expected = run(folder, placement="owner", **given)
    return run(folder, load=MIDDLE, **given), expected


def through_stages(folder: str, other: str) -> Run:
    """Into the stages of a pipeline and saved by them, then on as a whole.

    The stages take no step: torchtitan 0.3.0 has a pipeline for a torch that is not released.
    """
    with built(folder, load=MIDDLE, pipeline_parallel_degree=2) as trainer:
        assert len(trainer.model_parts) == 2  # interleaved
        trainer.checkpointer.load(step=MIDDLE)
        trainer.checkpointer.load_only = False
        trainer.checkpointer.folder = str(Path(other, "checkpoint"))
        trainer.checkpointer.save(MIDDLE)
    return run(other, load=MIDDLE, placement="owner")


def averages(folder: str) -> tuple[bool, str]:
    """Check that W̄ is validated and saved at the end, and that the run is resumed from W."""
    seen = []

    def validate(self, model_parts, step):
        seen.append([full(p.detach()).clone() for p in model_parts[0].parameters()])

    given = {"average": 0.3, "placement": "owner"}
    with mock.patch("time.sleep"), mock.patch.object(Validator, "validate", validate):
        with built(folder, **given) as trainer:
            trainer.train()
            (part,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
            raw, last = weights(trainer), seen[-1]
            held = [full(optimizer.state[p]["average"]) for p in part.parameters()]
            expected = {
                name: full(x).clone() for name, x in optimizer.averaged_state_dict(part).items()
            }
            own = {name: full(x).clone() for name, x in part.state_dict().items()}
            saved = {name: torch.zeros_like(x) for name, x in own.items()}
        dcp.load(saved, checkpoint_id=str(Path(folder, "checkpoint", f"step-{STEPS}")))
        found = run(folder, load=MIDDLE, **given).weights
    right = (
        all(map(torch.equal, last, held)),
        all(torch.equal(saved[n], x) for n, x in expected.items()),
        not any(torch.equal(saved[n], x) for n, x in own.items()),
        all(torch.equal(found[n], w) for n, w in raw.items()),
    )
    return all(right), f"validated, saved, is not raw, goes on from raw: {right}"


def same(found: Run, expected: Run) -> tuple[bool, str]:
    """Check that weights and losses agree bit for bit."""
    for name, weight in expected.weights.items():
        if not torch.equal(weight, found.weights[name]):
            return False, f"{name} differs by {(weight - found.weights[name]).abs().max():.3g}"
    steps = {step: loss for step, loss in expected.losses.items() if step > MIDDLE}
    return found.losses == steps, f"losses {list(found.losses.values())}"


def close(found: Run, expected: Run) -> tuple[bool, str]:
    """Check that the matrices have moved alike, up to gradients rounded to bfloat16.

    Forward and backward through two layers round some 20 times by 2⁻⁹ at most: 20·2⁻⁹ = 4 %.
    Without its moments a run moves them elsewhere, by a third.
    """
    moved = [
        (found.weights[name] - start, expected.weights[name] - start)
        for name, start in found.start.items()
        if "layers" in name and start.ndim > 1
    ]
    error = sum((x - y).square().sum() for x, y in moved) / sum(y.square().sum() for _, y in moved)
    return bool(error.sqrt() < 20 * 2**-9), f"moved apart by {error.sqrt():.2%}"


def rates() -> tuple[bool, str]:
    """Check that AdamW's parameters have the options of torchtitan, or of the override."""
    norms = ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 2e-3})
    patterns = [norms, *default_adamw(lr=8e-4).param_groups]
    with torch.device("meta"):
        model = llama3_debugmodel().model_spec.model.build()
    names = {param: name for name, param in model.named_parameters()}

    def found(change=None, **options) -> dict[str, tuple]:
        config = OptimizersContainer.Config(param_groups=patterns, implementation="for-loop")
        (optimizer,) = (change(config, **options) if change else config).build(model_parts=[model])
        return {
            names[param]: tuple(group.get(x) for x in ("lr", "weight_decay", "betas", "eps"))
            for group in optimizer.param_groups
            for param in group["params"]
        }

    theirs, ours = found(), found(leon, lr=0.5, wire_dtype="bfloat16")
    ends = {name for name in theirs if not name.startswith("layers") or "norm" in name}
    told = found(leon, lr=0.5, aux_lr=0.25, weight_decay=0.125)
    right = (
        {name: ours[name] for name in ends} == {name: theirs[name] for name in ends},
        all(ours[name][:2] == (0.5, 0.0) for name in {*theirs} - ends),
        all(told[name] == (0.25, *theirs[name][1:]) for name in ends),
        all(told[name][:2] == (0.5, 0.125) for name in {*theirs} - ends),
    )
    return all(right), f"lr, decay, betas, eps of the norm: {ours['norm.weight']}"


CASES = {
    "owner → owner": (same, {"placement": "owner"}),
    "owner → local": (same, {"placement": "local"}),
    "… without activation checkpointing": (same, {"ac": False}),
    "… tensor parallel": (close, {"placement": "owner", "tensor_parallel_degree": 2}),
    "… replicated": (close, {"placement": "owner", "data_parallel_replicate_degree": 2}),
}


def main() -> None:
    """Run them all; exit with the number of those that fail."""
    dist.init_process_group("gloo")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")  # of random numbers and autocast on a CPU
    failed = 0

    def report(what: str, outcome: tuple[bool, str]) -> None:
        nonlocal failed
        failed += not outcome[0]
        if dist.get_rank() == 0 or not outcome[0]:
            print(f"{'ok  ' if outcome[0] else 'FAIL'} {what}: {outcome[1]}", flush=True)

    with tempfile.TemporaryDirectory() as own:
        folders = [f"{own}/{name}" for name in ("whole", "stages", "experts", "average")]
        dist.broadcast_object_list(folders)
        report("rates", rates())
        expected = run(folders[0], placement="owner")
        for what, (check, given) in CASES.items():
            report(what, check(run(folders[0], load=MIDDLE, **given), expected))
        report("… pipeline → owner", same(through_stages(*folders[:2]), expected))
        report("experts: owner → local", same(*with_experts(folders[2])))
        report("the average", averages(folders[3]))
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
