"""`nucleon train` on CUDA: the host waits for the device where a record is due, nowhere else."""

import pytest
import torch

from nucleon.training import (
    GPT,
    GPTConfig,
    Nobody,
    Options,
    Recipe,
    begin,
    make_optimizer,
    text,
    train,
)
from nucleon.training.clock import Clock
from nucleon.training.run import read_log

WARM = 6  # steps before all is compiled, tuned and captured
EVERY = 5
DATA = text("the quick brown fox jumps over the lazy dog. " * 40, context=16)
CUDA = torch.device("cuda", 0)


class Strict(Nobody):
    """Forbids synchronization from a step's end to the end of the next optimizer step.

    The figures of a record are fetched after the optimizer's step, so there it is allowed.
    """

    def __init__(self, optimizer, recipe):
        self.recipe, self.done, self.records = recipe, 0, []
        optimizer.register_step_post_hook(self.after_optimizer)

    def after_optimizer(self, *_):
        if self.recipe.due(self.recipe.log_every, self.done + 1):
            torch.cuda.set_sync_debug_mode("default")

    def record(self, record):
        self.records.append(record)

    def stepped(self, done, /):
        self.done = done
        torch.cuda.set_sync_debug_mode("error" if done >= WARM else "default")


@pytest.fixture(autouse=True)
def _synchronization_is_allowed_afterwards():
    yield
    torch.cuda.set_sync_debug_mode("default")


def trained(name, compiled, **more):
    torch.manual_seed(0)
    model = GPT(GPTConfig(DATA.tokenizer.size, context=16, layers=2, heads=2, width=64)).to(CUDA)
    optimizer = make_optimizer(name, model)
    for hook in more.pop("hooks", ()):
        optimizer.register_step_pre_hook(hook)
    if compiled:
        model.compile()
    recipe = Recipe(4 * EVERY, clip=1.0, log_every=EVERY, schedule="cosine", **more)
    strict, clock = Strict(optimizer, recipe), Clock(CUDA)
    train(model, optimizer, lambda i: DATA.batch(i, 8, seed=0), recipe, watcher=strict, clock=clock)
    return strict, clock


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["leon", "muon", "adamw"])
def test_no_synchronization_between_records(name, compiled):
    strict, clock = trained(name, compiled, accumulate=2, precision="bf16")
    assert [r["step"] for r in strict.records] == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]
    assert 0 < clock.share < 1 and clock.steps == 4 * EVERY


def test_a_synchronization_would_be_seen():
    def look(optimizer, *_):
        float(optimizer.param_groups[0]["params"][0].sum())

    with pytest.raises(RuntimeError, match="synchroniz"):
        trained("leon", compiled=False, hooks=[look])


def test_a_run_is_compiled_unless_told_otherwise(tmp_path):
    options = Options("digits", Recipe(8, log_every=1), batch=16, width=32)
    losses = {}
    for name, compiled in (("default", None), ("plain", False)):
        run = begin(options, tmp_path / name, device="cuda", compiled=compiled, say=pytest.fail)
        assert run.compiled is (compiled is None)
        summary = run.go()
        assert summary.finished and 0 < summary.optimizer_share < 1
        losses[name] = read_log(run.folder / "trace.jsonl")[0]["loss"]
    # The loss before any step: three float32 products of up to 64 terms, summed in two orders.
    assert losses["default"] == pytest.approx(losses["plain"], rel=3 * 64 * 2**-23)
