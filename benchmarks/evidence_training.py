"""One run of `evidence.py`, which the host feeds without waiting for it.

Batches, rates and the number of the step are tensors on the device, so a step has no inputs from
the host: on CUDA it is captured once, forward, backward and optimizer together, and replayed. The
losses on held-out text stay on the device until the end. Several runs advance side by side, each on
a stream of its own.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import nucleon
from evidence_corpus import Corpus
from evidence_stages import (
    ADAMW,
    HALF_LIFE,
    MATRIX_OPTIONS,
    OPTIONS,
    VARIANTS,
    Stage,
    Trial,
    Variant,
)
from gpt import GPT
from gpt import loss as cross_entropy

POINTS = 20
"""Evaluations in a run."""
JUDGED, TOGETHER = 256, 128
"""Windows of held-out text in an evaluation, and in one of its batches."""
HEAD = 64
"""Width of a head of attention."""
RANK = 8
"""Of the adapters."""
AHEAD = 3
"""Steps of a run that may be waiting for the device.

They are launched one at a time, each run in turn: the host waits where a stream is full, and
meanwhile a run that has nothing queued stands still.
"""
WARMUP = 0.05
"""Share of the steps in which the rate rises."""

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Weights = Mapping[str, Tensor]


class Texts:
    """The tokens of a corpus on the device.

    Args:
        corpus: the tokens.
        context: length of a window.
        device: where.
    """

    def __init__(self, corpus: Corpus, context: int, device: torch.device) -> None:
        self.vocabulary = corpus.vocabulary
        self.fingerprint = corpus.fingerprint
        self.tokens = corpus.tokens.to(device, torch.int32)
        self.offsets = torch.arange(context + 1, device=device)
        held_out = corpus.held_out.to(device, torch.int32)
        count = min(JUDGED, len(held_out) // (context + 1))
        spread = torch.linspace(0, len(held_out) - context - 1, count, dtype=torch.float64)
        windows = held_out[spread.long().to(device)[:, None] + self.offsets]
        self.held_out = [pair(part) for part in windows.split(min(TOGETHER, count))]
        self.shares = [len(inputs) / count for inputs, _ in self.held_out]

    def places(self, count: int, seed: int) -> Tensor:
        """The beginnings of `count` windows, at random: the same ones whatever the batch size."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.tokens) - len(self.offsets)
        return torch.randint(last + 1, (count,), generator=generator).to(self.tokens.device)


def pair(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs, and the same one token later."""
    return windows[:, :-1], windows[:, 1:].long()


class Adapted(nn.Module):
    """A frozen linear map and a trained one of low rank: Wx + up(down x), which begins as Wx."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, RANK, bias=False, device=weight.device)
        self.up = nn.Linear(RANK, linear.out_features, bias=False, device=weight.device)
        nn.init.normal_(self.down.weight, std=linear.in_features**-0.5)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        return self.linear(x) + self.up(self.down(x))


class Training:
    """A run: `advance` until it is `over`, then `results`.

    Args:
        stage: whose.
        trial: which.
        texts: to train on.
        capture: whether to replay a captured step where the device can (True).
        loss: of a model on a batch, compiled or not (`gpt.loss`).
        weights: to begin with (None: drawn from the seed).
        stream: on CUDA, that no other run uses at the time (None: a new one).
    """

    def __init__(
        self,
        stage: Stage,
        trial: Trial,
        texts: Texts,
        *,
        capture: bool = True,
        loss: Loss = cross_entropy,
        weights: Weights | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.trial, self.texts, self.loss = trial, texts, loss
        self.device = texts.tokens.device
        self.cuda = self.device.type == "cuda"
        self.stream = (stream or torch.cuda.Stream(self.device)) if self.cuda else None
        self.done, self.graph, self.note = 0, None, ""
        self.events: list[Any] = []
        self.watched: dict[str, float] = {}
        self.began = time.perf_counter()
        if self.stream is not None:  # what is on the device already was put there by another one
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
        with self.on_stream():
            self.model = network(stage, trial, texts.vocabulary, self.device, weights)
            self.optimizer = optimizer(trial, self.model, stage.context)
            self._put_on_device()
            self._step()  # compiles, and makes what is kept between steps
            self.done = 1
            self._evaluate_where_due()
            if capture and self.cuda:
                self._capture()

    @property
    def over(self) -> bool:
        """Whether all of it is on its way."""
        return self.done == self.trial.steps

    def ready(self) -> bool:
        """Whether the device needs more to do soon, or is done with it."""
        self.events = [event for event in self.events if not event.query()]
        return not self.events if self.over else len(self.events) < AHEAD

    def advance(self) -> None:
        """Take a step and what evaluation is due; waits for the device at half of the run alone."""
        with self.on_stream():
            self.take(1)
            self._evaluate_where_due()
            if self.stream is not None:
                event = torch.cuda.Event()
                event.record(self.stream)
                self.events.append(event)
            if self.done == self._end(POINTS // 2):
                self.watched |= watch(self.optimizer, "half")

    def take(self, count: int) -> None:
        """So many steps, on the current stream."""
        for _ in range(count):
            self._step() if self.graph is None else self.graph.replay()
        self.done += count

    def results(self) -> dict[str, Any]:
        """What the log says of it; waits for the device."""
        with self.on_stream():
            self.watched |= watch(self.optimizer, "end")
            losses = [round(loss, 5) for loss in self.losses.tolist()]
        final = losses[-1]
        fine = math.isfinite(final) and final < math.log(self.texts.vocabulary)
        return {
            "status": "ok" if fine else "diverged",
            "final_loss": final,
            "losses": [[self._end(i + 1), loss] for i, loss in enumerate(losses)],
            "seconds": round(time.perf_counter() - self.began, 2),
            "captured": self.graph is not None,
            **({"note": self.note} if self.note else {}),
            **self.watched,
        }

    def _end(self, point: int) -> int:
        """The step after which evaluation `point`, 1, …, `POINTS`, is taken."""
        return max(1, round(self.trial.steps * point / POINTS))

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """What is launched goes to the stream of the run."""
        with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
            yield

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)

    def _put_on_device(self) -> None:
        trial = self.trial
        places = self.texts.places(trial.steps * trial.sequences, trial.seed)
        rising = math.ceil(WARMUP * trial.steps)
        falling = max(1, trial.steps - rising)
        factors = [min((s + 1) / rising, (trial.steps - s) / falling) for s in range(trial.steps)]
        self.places = places.view(trial.steps, trial.sequences)
        self.factors = torch.tensor(factors, device=self.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.losses = torch.full((POINTS,), math.nan, device=self.device)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = torch.tensor(rate, device=self.device)

    def _step(self) -> None:
        places = self.places.index_select(0, self.number)[0]
        inputs, targets = pair(self.texts.tokens[places[:, None] + self.texts.offsets])
        factor = self.factors.index_select(0, self.number)[0]
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"].copy_(rate * factor)
        with self._autocast():
            loss = self.loss(self.model, inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1

    def _capture(self) -> None:
        """Record a step, as `torch.cuda.graph` does but without waiting for the other runs.

        The gradients are made in the graph's own memory. Where it cannot be captured the steps are
        taken one by one, and the log says so.
        """
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a graph that dies now would end the capture
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._step()
            finally:
                graph.capture_end()
        except Exception as error:  # many kinds; a device that is lost shows in the next step
            self.note = f"not captured: {reason(error)}"
            self.optimizer.zero_grad(set_to_none=True)  # those of the capture were never computed
        else:
            self.graph = graph
        finally:
            if collecting:
                gc.enable()

    def _evaluate_where_due(self) -> None:
        for index in range(POINTS):
            if self._end(index + 1) == self.done:
                self._evaluate(index)

    @torch.no_grad()
    def _evaluate(self, index: int) -> None:
        with self._autocast():
            parts = [cross_entropy(self.model, *batch) for batch in self.texts.held_out]
        self.losses[index] = sum(s * part for s, part in zip(self.texts.shares, parts, strict=True))


def network(
    stage: Stage, trial: Trial, vocabulary: int, device: torch.device, weights: Weights | None
) -> nn.Module:
    """The GPT of a stage, its weights drawn from the seed on the device, or given."""
    torch.manual_seed(trial.seed)
    heads = max(1, stage.width // HEAD)
    with device:
        model = GPT(
            vocabulary, context=stage.context, layers=stage.layers, heads=heads, width=stage.width
        )
    if weights is not None:
        model.load_state_dict(weights)
    if trial.adapter:
        model.requires_grad_(False)
        for module in list(model.blocks.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child))
    return model.train()


def optimizer(trial: Trial, model: nn.Module, context: int) -> Optimizer:
    """The optimizer of a method, or of a variant of one, with its fixed options."""
    variant = VARIANTS.get(trial.method, Variant(trial.method))
    name, own = OPTIONS[variant.of]
    beta2, tokens = HALF_LIFE
    betas = (0.9, beta2 ** (trial.sequences * context / tokens))
    if trial.method == ADAMW:
        trained = [p for p in model.parameters() if p.requires_grad]
        fast = {"fused": True, "capturable": True} if trained[0].is_cuda else {"foreach": False}
        return torch.optim.AdamW(trained, lr=trial.rate, betas=betas, weight_decay=0.0, **fast)
    aux = {} if trial.aux_lr is None else {"aux_lr": trial.aux_lr}
    options = {**MATRIX_OPTIONS, **own, **variant.options, **aux, "aux": {"betas": betas}}
    return nucleon.create(name, model, lr=trial.rate, **options)


def watch(found: Optimizer, when: str) -> dict[str, float]:
    """The mean smoothing share and cosine to Muon over all matrices of a Leon."""
    if not isinstance(found, nucleon.Leon):
        return {}
    values = found.diagnostics()
    means: dict[str, float] = {}
    for quantity in ("smoothing_share", "cosine_to_muon"):
        some = [value for key, value in values.items() if key.endswith(quantity)]
        means[f"{quantity}_{when}"] = round(sum(some) / len(some), 4)
    return means


def reason(error: BaseException) -> str:
    """The first line of an error."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:300]
