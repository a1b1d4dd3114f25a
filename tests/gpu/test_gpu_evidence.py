"""The captured step of `nucleon bench evidence` is the plain one, alone and beside others."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import evidence_stages as stages
from evidence_corpus import Corpus
from evidence_training import Texts, Training

STAGE = replace(stages.tiny(stages.A), width=128, layers=2, context=64, tokens=60 * 8 * 64)
CELL = replace(STAGE.cells[0], sequences=8)
AGREE = 0.02
"""Nats: products in bfloat16, added in another order, over 60 steps that gain more than one."""


@pytest.fixture(scope="module")
def texts():
    tokens = (7 * torch.arange(30_000) % 61).to(torch.int16)
    return Texts(Corpus(tokens[:28_000], tokens[28_000:], ()), STAGE.context, torch.device("cuda"))


def losses(*runs):
    """What runs that advance in turn have at the end."""
    while not all(run.over for run in runs):
        for run in runs:
            if not run.over:
                run.advance()
    return [[loss for _, loss in run.results()["losses"]] for run in runs]


@pytest.mark.parametrize("method", stages.ALL)
def test_a_replayed_run_is_the_plain_one(texts, method):
    trial = stages.trial(STAGE, CELL, method, 4e-3, 4e-3, 0, "")
    plain = Training(STAGE, trial, texts, capture=False)
    assert plain.graph is None
    (expected,) = losses(plain)
    beside = [Training(STAGE, trial, texts) for _ in range(3)]
    assert all(run.graph is not None for run in beside), beside[0].note
    assert expected[-1] < expected[0] - 1  # another rate or other batches would show
    for found in losses(*beside):
        assert found == pytest.approx(expected, abs=AGREE)


def test_the_rate_of_a_replayed_step_follows_the_schedule(texts):
    trial = stages.trial(STAGE, CELL, stages.LEON, 4e-3, 2e-3, 0, "")
    run = Training(STAGE, trial, texts)
    losses(run)
    last = run.factors[-1].item()
    rates = [group["lr"].item() for group in run.optimizer.param_groups]
    assert rates == pytest.approx([rate * last for rate in run.rates]) and 0 < last < 0.05
    assert run.number.item() == trial.steps
