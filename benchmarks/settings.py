"""Learning rates that worked: AdamW, Muon and Leon on five small tasks, in minutes on a CPU.

OMP_NUM_THREADS=1 python benchmarks/settings.py            # all tasks
python benchmarks/settings.py --task lora --seeds 1

A rate is searched by factors of two until the best one is inside its grid. A run rises over 5 % of
its steps and falls linearly to zero, unless it keeps an average. Losses are held-out nats, means
over the seeds. `docs/tuning.md` has the tables and what follows from them.
"""

import argparse
import copy
import math
import platform
import statistics
import sysconfig
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import peft
import sklearn
import torch
import torch.nn.functional as F  # noqa: N812, as everyone writes it
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import update_bn

import nucleon
from gpt import GPT, Text, loss, read
from nucleon.report.runs import processor

HABIT = 3e-4  # often taken for AdamW without a search
BETAS = (0.9, 0.99)  # of AdamW, for all weights or for those that are no matrices


class ViT(nn.Module):
    """Images of 8×8 → logits of 10 classes, by 16 patches of 2×2 and two pre-norm blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(1, width, 2, stride=2), nn.Embedding(16, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, **options)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(b, 1, 8, 8) → (b, 10)."""
        x = self.patches(images).flatten(2).mT + self.positions.weight
        return self.head(self.norm(self.blocks(x).mean(1)))


def cnn() -> nn.Module:
    """Return three convolutions, two of them with batch normalization behind, and a head."""
    first = (nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    second = (nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    body = nn.Sequential(*first, *second, nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(128, 10)))


Problem = tuple[nn.Module, Callable[[int], Tensor], Callable[[], Tensor]]
"""A model, its loss on the batch of a step, and its held-out loss."""


def images(build: Callable[[], nn.Module], seed: int) -> Problem:
    """Train on 1,347 digits of scikit-learn in batches of 64; judge by the other 450."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = (x[order].float().view(-1, 1, 8, 8) - 4.9) / 6.0, y[order]
    torch.manual_seed(seed)
    model, batches = build(), torch.Generator().manual_seed(seed)

    def at(_: int) -> Tensor:
        rows = torch.randint(1347, (64,), generator=batches)
        return F.cross_entropy(model(x[rows]), y[rows])

    def judge() -> Tensor:
        update_bn(x[:1347].split(449), model)
        return F.cross_entropy(model.eval()(x[1347:]), y[1347:])

    return model, at, judge


@cache
def text(prose: bool) -> Text:
    """Return the sources of Python as characters, or the reference of the language in prose."""
    topics = Path(sysconfig.get_path("stdlib")) / "pydoc_data/topics.py"
    content = read(topics if prose else None).encode("ascii", "replace")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    cut = len(tokens) - len(tokens) // 10
    return Text(tokens[:cut], tokens[cut:], 128, context=64)


def words(model: nn.Module, seed: int, *, prose: bool) -> Problem:
    """Train on 8 windows of 64 characters; judge by 64 windows of the end of the text."""

    def judge() -> Tensor:
        return torch.stack([loss(model, *batch) for batch in text(prose).judged(64)]).mean()

    return model, lambda t: loss(model, *text(prose).batch(t, 8, seed=seed)), judge


def gpt(seed: int) -> Problem:
    """Train a GPT of 0.1 M weights on the sources."""
    torch.manual_seed(seed)
    return words(GPT(128, context=64, layers=2, heads=2, width=64), seed, prose=False)


@cache
def pretrained(steps: int = 600) -> nn.Module:
    """Return the GPT after AdamW on the sources."""
    model, at, _ = gpt(100)
    train(at, Way("AdamW").optimizer(model, 4e-3), steps)
    return model


def finetune(seed: int, rank: int = 0) -> Problem:
    """Train all weights of the pre-trained GPT on the prose, or LoRA's of a rank."""
    model = copy.deepcopy(pretrained())
    if rank:
        torch.manual_seed(seed)
        parts = ["query", "value", "up", "down"]
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=parts)
        model = peft.get_peft_model(model, config)
    return words(model, seed, prose=True)


TASKS: Mapping[str, tuple[Callable[[int], Problem], int, float]] = {
    "gpt": (gpt, 250, 8e-3),
    "cnn": (partial(images, cnn), 150, 8e-3),
    "vit": (partial(images, ViT), 200, 4e-3),
    "finetune": (finetune, 100, 2e-3),
    "lora": (partial(finetune, rank=4), 100, 8e-3),
}
"""Problem of a seed, steps, and the rate at which the search for AdamW's begins."""


def train(at: Callable[[int], Tensor], optimizer: Optimizer, steps: int, decay: int = 1) -> None:
    """Take the steps, with a warm-up, and a linear decay unless it is 0."""

    def factor(t: int) -> float:
        return min(1.0, 20 * (t + 1) / steps) * (1 - decay * t / steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for t in range(steps):
        at(t).backward()
        optimizer.step(), optimizer.zero_grad(), schedule.step()


class Way(NamedTuple):
    """An optimizer and its options but the rate; with an average the rate is constant."""

    kind: str
    scale: str = ""
    aux_lr: float = 0.0  # 0: the rate of the matrices
    average: float | None = None

    def optimizer(self, model: nn.Module, rate: float) -> Optimizer:
        """Return the optimizer of a model."""
        if self.kind == "AdamW":
            return torch.optim.AdamW(model.parameters(), rate, BETAS, weight_decay=0.0)
        make = getattr(nucleon, self.kind).for_model
        more = {"aux_lr": self.aux_lr or rate, "aux": {"betas": BETAS}, "average": self.average}
        return make(model, lr=rate, scale=self.scale, **more)


def run(task: str, way: Way, rate: float, seed: int) -> float:
    """Return the held-out loss of one run."""
    make, steps, _ = TASKS[task]
    model, at, judge = make(seed)
    optimizer = way.optimizer(model, rate)
    train(at, optimizer, steps, decay=way.average is None)
    with torch.no_grad(), optimizer.averaged() if way.average else nullcontext():
        return judge().item()


def report(task: str, seeds: int) -> None:
    """Search the rates of a task, and print a row for each way."""
    start, table = time.process_time(), defaultdict[Way, dict[float, float]](dict)

    def at(way: Way, rate: float) -> float:
        if rate not in table[way]:
            mean = statistics.fmean(run(task, way, rate, seed) for seed in range(seeds))
            table[way][rate] = mean if math.isfinite(mean) else math.inf
        return table[way][rate]

    def search(way: Way, first: float) -> float:
        rates = [first / 2, first, first * 2]
        while True:
            place = min(range(len(rates)), key=lambda i: at(way, rates[i]))
            if 0 < place < len(rates) - 1 or len(rates) > 8:
                return rates[place]
            rates = [rates[0] / 2, *rates] if place == 0 else [*rates, 2 * rates[-1]]

    best = search(Way("AdamW"), TASKS[task][2])
    at(Way("AdamW"), HABIT)
    for kind in ("Muon", "Leon"):
        matched = Way(kind, "match-adamw")
        at(matched, HABIT), at(matched, best)
        rate = search(Way(kind, "spectral", best), 0.02)
        if kind == "Muon":
            search(matched, best)
            at(Way(kind, "spectral", 1e-3), rate)
            at(Way(kind, "spectral", best, 0.1), rate / 2)
    spent = time.process_time() - start
    print(f"\n{task}: {TASKS[task][1]} steps, {seeds} seeds, {spent:.0f} s of processor time\n")
    print("| optimizer | scale | `aux_lr` | rate: held-out loss |\n|---|---|---|---|")
    for way, losses in table.items():
        cells = [f"{rate:.3g}: {value:.3f}" for rate, value in sorted(losses.items())]
        name = f"{way.kind}, average={way.average}" if way.average else way.kind
        print("|", name, "|", way.scale, "|", way.aux_lr or "", "|", ", ".join(cells), "|")


def main(arguments: Sequence[str] | None = None) -> None:
    """Search the rates of the tasks that are named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args(arguments)
    used = {"torch": torch, "peft": peft, "scikit-learn": sklearn}
    versions = [f"{name} {module.__version__}" for name, module in used.items()]
    threads = f"{torch.get_num_threads()} threads"
    print(processor(), threads, f"Python {platform.python_version()}", *versions, sep=", ")
    for task in args.task:
        report(task, args.seeds)


if __name__ == "__main__":
    main()
