"""Callbacks write what diagnostics() says, when they should; the Trainer's factory routes."""

from itertools import pairwise
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import nucleon
from nucleon.integrations.huggingface import AverageCallback, DiagnosticsCallback, factory
from nucleon.integrations.lightning import DiagnosticsLogger
from nucleon.integrations.quantities import quantities
from nucleon.integrations.tensorboard import DiagnosticsWriter
from nucleon.optim.average import get_multi_avg_fn


class Board:
    def __init__(self):
        self.written = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.written.append((tag, scalar_value, global_step))


def trained(steps, board, every, **options):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = nucleon.Leon.for_model(model, head="2")
    writer = DiagnosticsWriter(optimizer, board, every=every, **options)
    for _ in range(steps):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, writer


def test_every_nth_step_is_written_as_diagnostics_says():
    board = Board()
    optimizer, writer = trained(6, board, every=3)
    expected = optimizer.diagnostics()
    assert {step for _, _, step in board.written} == {3, 6}
    assert {tag: value for tag, value, step in board.written if step == 6} == expected
    assert all(isinstance(value, float) for value in expected.values())
    writer.close()
    count = len(board.written)
    optimizer.step()
    assert len(board.written) == count
    board = Board()
    trained(3, board, every=5, start=7)  # a resumed run
    assert {step for _, _, step in board.written} == {10}
    optimizer, writer = trained(2, None, every=1)  # a silent rank, which takes part
    optimizer.diagnostics = mock.Mock(return_value={"a": 1.0})
    writer.write()
    optimizer.diagnostics.assert_called()


def lightning(**options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", **{**quiet, "logger": False, **options})


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def training_step(self, batch, index):
        return self.head(self.body(batch[0]).relu()).square().mean()

    def configure_optimizers(self):
        return nucleon.Leon.for_model(self)


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_every_nth_step_once_for_all_loggers(tmp_path, monkeypatch):
    calls, logged = [], []
    counted = lambda optimizer: calls.append(1) or quantities(optimizer)  # noqa: E731
    monkeypatch.setattr("nucleon.integrations.lightning.quantities", counted)
    loggers = [CSVLogger(tmp_path, name) for name in ("a", "b")]
    for logger in loggers:
        logger.log_metrics = lambda metrics, step=None: logged.append((step, metrics))
    trainer = lightning(
        max_epochs=1,
        logger=loggers,
        callbacks=[DiagnosticsLogger(every=2)],
        accumulate_grad_batches=2,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2))
    ours = [(step, m) for step, m in logged if any(key.startswith("leon/") for key in m)]
    assert [step for step, _ in ours] == [2, 2, 4, 4] and len(calls) == 2
    assert ours[-1][1] == trainer.optimizers[0].diagnostics()


class Averaged(Module):
    """Muon that keeps the average too, at a rate that falls without a horizon."""

    def configure_optimizers(self):
        optimizer = nucleon.Muon.for_model(self, lr=0.02, head="head", average=0.2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (1 + t / 3) ** -0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch, index):
        (x,) = batch
        self.log("loss", self.head(self.body(x)).square().mean())


@pytest.mark.filterwarnings("ignore")
def test_the_average_as_lightning_keeps_it_is_that_of_the_optimizer(tmp_path):
    """Validated, saved and resumed by Lightning's own callback, the raw weights beside it."""
    data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)

    def run(epochs, resume=None):
        torch.manual_seed(0)
        module = Averaged()
        saver = ModelCheckpoint(tmp_path, filename=f"{epochs}", save_last=False)
        averaging = WeightAveraging(multi_avg_fn=get_multi_avg_fn(0.2))
        trainer = lightning(max_epochs=epochs, callbacks=[averaging, saver])
        trainer.fit(module, data, data, ckpt_path=resume)
        return module, trainer, torch.load(tmp_path / f"{epochs}.ckpt", weights_only=False)

    module, trainer, saved = run(2)
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * (1 + 8 / 3) ** -0.5)
    with torch.no_grad():
        for name, p in module.named_parameters():  # W̄ since the end of the training
            average = optimizer.state[p]["average"]
            torch.testing.assert_close(p.detach(), average)
            torch.testing.assert_close(saved["state_dict"][name], average)
            assert not torch.allclose(saved["current_model_state"][name], average)
            p.copy_(average)
        loss = torch.cat([module.head(module.body(x)) for (x,) in data]).square().mean()
    assert trainer.callback_metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    _, _, whole = run(4)
    _, _, resumed = run(4, resume=tmp_path / "2.ckpt")
    for kept in ("state_dict", "current_model_state"):
        assert all(torch.equal(x, resumed[kept][name]) for name, x in whole[kept].items())


class Unfreeze(BaseFinetuning):
    """The body is frozen until the second epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch >= 1:  # Lightning itself forgets what is unfrozen when it resumes
            self.unfreeze_and_add_param_group(pl_module.body, optimizer)


class Watched(Module):
    """The body at the beginning and after each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = [self.body.weight.detach().clone()]

    def on_train_epoch_end(self):
        self.seen.append(self.body.weight.detach().clone())


@pytest.mark.filterwarnings("ignore")
def test_finetuning_of_lightning_unfreezes_and_resumes(tmp_path):
    def fit(resume=None):
        torch.manual_seed(0)
        model = Watched()
        saver = ModelCheckpoint(tmp_path, save_top_k=-1)
        trainer = lightning(max_epochs=3, callbacks=[Unfreeze(), saver])
        data = DataLoader(TensorDataset(torch.linspace(-1, 1, 64).reshape(16, 4)), batch_size=4)
        trainer.fit(model, data, ckpt_path=resume)
        return model, trainer.optimizers[0]

    whole, optimizer = fit()
    changed = [not torch.equal(*pair) for pair in pairwise(whole.seen)]
    assert changed == [False, True, True]
    names = {optimizer.infos[p].name for g in optimizer.param_groups for p in g["params"]}
    assert names == {"body.weight", "body.bias", "head.weight", "head.bias"}
    for epoch in (0, 1):  # before it is unfrozen, and after
        resumed, _ = fit(tmp_path / f"epoch={epoch}-step={4 * (epoch + 1)}.ckpt")
        assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


@pytest.mark.parametrize("arguments", [(), (TrainingArguments("."),)], ids=["Trainer", "axolotl"])
def test_the_factory_makes_an_optimizer_of_the_model_it_is_given(arguments):
    built = factory("muon")
    assert built.__name__ == "MuonFactory" and not issubclass(built, torch.optim.Optimizer)
    optimizer = built()(nn.Linear(3, 4), *arguments, lr=0.3, weight_decay=0.1)
    assert isinstance(optimizer, nucleon.Muon)
    assert [g["route"] for g in optimizer.param_groups] == ["matrix", "adamw"]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_what_would_be_ignored_and_bad_intervals_are_named(tmp_path):
    for missing, options in (("lr", {"weight_decay": 0.1}), ("weight_decay", {"lr": 0.3})):
        built = trainer(tmp_path, optimizer=(factory("leon"), options), learning_rate=7.0)
        with pytest.raises(ValueError, match=f"lack {missing}: .* TrainingArguments"):
            built.create_optimizer()
    for make in (
        lambda: DiagnosticsLogger(every=0),
        lambda: trained(0, Board(), 0),
        lambda: DiagnosticsCallback(None, 0),
    ):
        with pytest.raises(ValueError, match="every"):
            make()


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config)


def trainer(folder, model=None, optimizer=None, **arguments):
    ids = torch.arange(8)
    defaults = {"per_device_train_batch_size": 2, "lr_scheduler_type": "constant", "max_steps": 4}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return Trainer(
        model or llama(),
        TrainingArguments(str(folder), **{**defaults, **quiet, **arguments}),
        train_dataset=[{"input_ids": ids, "labels": ids}] * 8,
        eval_dataset=[{"input_ids": ids, "labels": ids}] * 8,
        optimizer_cls_and_kwargs=optimizer or (factory("leon"), {"lr": 0.01, "weight_decay": 0.1}),
    )


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_evaluates_and_saves_the_average_and_goes_on_from_the_raw_weights(tmp_path):
    def run(resume=None):
        built = trainer(
            tmp_path,
            optimizer=(factory("muon"), {"lr": 0.02, "weight_decay": 0.0, "average": 0.1}),
            lr_scheduler_type="inverse_sqrt",
            lr_scheduler_kwargs={"timescale": 2},
            warmup_steps=1,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=2,
        )
        built.add_callback(AverageCallback(built))
        built.train(resume_from_checkpoint=resume)
        return built

    whole = run()
    optimizer = whole.optimizer.optimizer
    rates = [group["lr"] for group in optimizer.param_groups if group["route"] == "matrix"]
    assert rates[0] == pytest.approx(0.02 * (1 + 3 / 2) ** -0.5)  # one step of warm-up
    batch = torch.arange(8)[None]
    raw = whole.model(batch, labels=batch).loss.item()
    with optimizer.averaged():
        expected = whole.model(batch, labels=batch).loss.item()
    assert expected != pytest.approx(raw, rel=1e-3)
    losses = [log["eval_loss"] for log in whole.state.log_history if "eval_loss" in log]
    assert [losses[-1], whole.evaluate()["eval_loss"]] == pytest.approx([expected] * 2, rel=1e-5)
    assert whole.predict(whole.train_dataset).metrics["test_loss"] == pytest.approx(expected)
    for folder in (tmp_path / "average", tmp_path / "checkpoint-4" / "average"):
        saved = LlamaForCausalLM.from_pretrained(folder)
        assert saved(batch, labels=batch).loss.item() == pytest.approx(expected, rel=1e-5)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert saved(batch, labels=batch).loss.item() == pytest.approx(raw, rel=1e-5)
    resumed = run(resume=str(tmp_path / "checkpoint-2"))
    again = resumed.optimizer.optimizer
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["average"], again.state[q]["average"])
    with pytest.raises(ValueError, match="best_model_checkpoint"):
        same = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2}
        built = trainer(tmp_path, load_best_model_at_end=True, save_steps=2, **same)
        AverageCallback(built)


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_logs_diagnostics_and_certificates(tmp_path):
    options = {"lr": 0.01, "weight_decay": 0.0, "gradient_bound": 10.0, "certify": True}
    built = trainer(tmp_path, optimizer=(factory("leon"), options), logging_steps=2)
    built.add_callback(DiagnosticsCallback(built, every=2))
    built.train()
    logs = [log for log in built.state.log_history if any(k.startswith("leon/") for k in log)]
    assert [log["step"] for log in logs] == [2, 4]
    optimizer = getattr(built.optimizer, "optimizer", built.optimizer)
    expected = optimizer.diagnostics()
    assert {k: logs[-1][k] for k in expected} == expected
    ratios = [logs[-1][k] for k in expected if k.endswith("update_ratio")]
    assert min(ratios) > 0  # the schedule of the Trainer is at 0 by now
    name = "model.layers.0.mlp.up_proj.weight"
    certificate = optimizer.certificates()[name]
    assert logs[-1][f"leon/{name}/regret"] == certificate.regret.item()
    assert logs[-1][f"leon/{name}/bound"] == certificate.bound.item()
    assert logs[-1][f"leon/{name}/holds"] == certificate.holds
    losses = [log for log in built.state.log_history if "loss" in log]
    assert [log["step"] for log in losses] == [2, 4]  # its own logging goes on
