"""The cells of `evidence.py`, as data, and their problems: a model, its loss, how it is judged.

The protocol in words is `docs/evidence.md`. This needs torch alone.
"""

import gzip
import lzma
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812, as everyone writes it
from torch import Tensor, nn
from torch.optim import Optimizer

import nucleon
from gpt import GPT, BytePairs, Text, characters, loss, read
from nucleon.online.problems import ripples

WINDOWS = 256
"""Held-out windows in a reading, spread evenly over the text."""
ALL = slice(None)
AUX = 0.25
"""AdamW's part of the rate, for what is no matrix."""


class Problem(NamedTuple):
    """A model that starts from a seed, its loss at a step, and its readings in nats."""

    model: nn.Module
    loss: Callable[[nn.Module, int], Tensor]
    judge: Callable[[nn.Module], dict[str, float]]


@cache
def places(last: int, size: int, steps: int, seed: int) -> Tensor:
    """Draw the samples of all steps, (steps, size)."""
    return torch.randint(last, (steps, size), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Words:
    """A GPT on a text: its characters, or `pairs` byte pairs that `evidence.py tokens` wrote.

    Without a source it reads Python's standard library; without a file to hold out, its own end.
    """

    source: str = ""
    held_out: str = ""
    pairs: int = 0
    layers: int = 3
    width: int = 96
    heads: int = 3
    context: int = 64
    batch: int = 16

    @cache  # noqa: B019, one text a process
    def text(self, data: Path, device: str) -> Text:
        """Load the tokens."""
        if self.pairs:
            files = [(data / f"{self.source}.{part}").read_bytes() for part in ("train", "held")]
            tokens = [torch.frombuffer(bytearray(file), dtype=torch.int16) for file in files]
            text = Text(*tokens, self.pairs, self.context)
        elif self.held_out:
            files = [(data / name).read_bytes() for name in (self.source, self.held_out)]
            train, held = (lzma.decompress(file).decode() for file in files)
            text = characters(train, context=self.context, held_out=held)
        else:
            content = read(data / self.source if self.source else None, 2_000_000)
            text = characters(content, context=self.context)
        return replace(text, tokens=text.tokens.to(device), held_out=text.held_out.to(device))

    def problem(self, seed: int, steps: int, data: Path, device: str) -> Problem:
        """Return the GPT of a seed; on CUDA products are bfloat16, and readings show over-fit."""
        text = self.text(data, device)
        size = {"layers": self.layers, "heads": self.heads, "width": self.width}
        with torch.device(device):
            model = GPT(text.vocabulary, context=self.context, **size)
        starts = places(len(text.tokens) - self.context, self.batch, steps, seed).to(device)
        products = partial(torch.autocast, device, torch.bfloat16, enabled=device == "cuda")
        judged = {"": text, " train": replace(text, held_out=text.tokens)}
        if device == "cpu":
            del judged[" train"]

        def at(model: nn.Module, step: int) -> Tensor:
            with products():
                return loss(model, *text.windows(text.tokens, starts[step]))

        def mean(model: nn.Module, some: Text) -> float:
            with products():
                return (
                    torch.stack([loss(model, *b) for b in some.judged(16, WINDOWS)]).mean().item()
                )

        return Problem(model, at, lambda m: {name: mean(m, some) for name, some in judged.items()})


@dataclass(frozen=True)
class Images:
    """A CNN on 8,000 images of Fashion-MNIST, judged on 2,000 others after `update_bn`."""

    batch: int = 64

    def problem(self, seed: int, steps: int, data: Path, device: str) -> Problem:
        """Return the CNN of a seed."""
        folder = data / "fashion-mnist-10k"
        files = [folder / f"t10k-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]
        unpacked = [bytearray(gzip.decompress(file.read_bytes())) for file in files]
        pixels, labels = (torch.frombuffer(raw, dtype=torch.uint8) for raw in unpacked)
        x, y = pixels[16:].view(-1, 1, 28, 28).float() / 255, labels[8:].long()
        x = (x - x.mean()) / x.std()
        layers: list[nn.Module] = []
        for before, after in ((1, 16), (16, 32), (32, 64)):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        drawn = places(8000, self.batch, steps, seed)

        def at(model: nn.Module, step: int) -> Tensor:
            return F.cross_entropy(model(x[drawn[step]]), y[drawn[step]])

        def judge(model: nn.Module) -> dict[str, float]:
            torch.optim.swa_utils.update_bn(x[:1024].split(256), model)
            model.eval()
            logits = torch.cat([model(part) for part in x[8000:].split(250)])
            model.train()
            wrong = (logits.argmax(1) != y[8000:]).double().mean().item()
            return {"": F.cross_entropy(logits, y[8000:]).item(), " error": wrong}

        return Problem(nn.Sequential(*layers, nn.Flatten(), nn.Linear(576, 10)), at, judge)


class Matrix(nn.Module):
    """A matrix alone."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start)


class Ripples:
    """Appendix H's problem in float64, judged by the excess over its minimum."""

    def problem(self, seed: int, *_: Any) -> Problem:
        """Return the instance and the start of a seed."""
        rippled = ripples.random_ripples([seed])
        start = ripples.random_start([seed])[0]

        def excess(model: nn.Module, _: int = 0) -> Tensor:
            return rippled.value(model.weight[None])[0] - ripples.MINIMUM

        return Problem(Matrix(start), excess, lambda model: {"": excess(model).item()})


@dataclass(frozen=True)
class Regression:
    """Regression in float64 by ρ(r) = max(τr, (τ−1)r), judged by the excess over its minimum.

    ½ is ℓ₁. The minimum is known: each of 64 inputs occurs twelve times, with ten residuals at W*
    whose slopes τ and τ − 1 add to zero and two that are zero, a kink. So 0 ∈ ∂f(W*).
    """

    quantile: float
    batch: int = 16

    def data(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and the minimizer W* of a seed."""
        draw = torch.Generator().manual_seed(seed)
        x, best, noise = (
            torch.randn(shape, generator=draw, dtype=torch.float64)
            for shape in ((64, 16), (16, 8), (64, 12, 8))
        )
        above = round(10 * (1 - self.quantile))  # τ·above = (1 − τ)·(10 − above)
        signs = torch.tensor([1.0] * above + [-1.0] * (10 - above) + [0.0] * 2)[:, None]
        inputs, best = x.repeat_interleave(12, 0), best / 4
        return inputs, inputs @ best + (signs * noise.abs()).flatten(0, 1), best

    def problem(self, seed: int, steps: int, *_: Any) -> Problem:
        """Return the problem of a seed; the matrix starts at zero."""
        inputs, targets, best = self.data(seed)

        def value(weight: Tensor, rows: Tensor | slice = ALL) -> Tensor:
            r = targets[rows] - inputs[rows] @ weight
            return torch.maximum(self.quantile * r, (self.quantile - 1) * r).mean()

        drawn, least = places(len(inputs), self.batch, steps, seed), value(best).item()
        return Problem(
            Matrix(torch.zeros_like(best)),
            lambda model, step: value(model.weight, drawn[step]),
            lambda model: {"": value(model.weight).item() - least},
        )


def matrices(
    kind: Any, model: nn.Module, rate: float, average: float | None, **options: Any
) -> Optimizer:
    """Return an optimizer of ours for a whole model, or for a matrix."""
    options |= {"lr": rate, "average": average}
    if isinstance(model, Matrix):
        return kind(model.parameters(), **options)
    head = "13" if isinstance(model, nn.Sequential) else "head"
    return kind.for_model(model, aux_lr=AUX * rate, head=head, **options)


def adamw(model: nn.Module, rate: float, _: float | None) -> Optimizer:
    """Return torch's AdamW for all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)


METHODS: Mapping[str, Callable[[nn.Module, float, float | None], Optimizer]] = {
    "muon": partial(matrices, nucleon.Muon),
    "leon": partial(matrices, nucleon.Leon),
    "leon .1": partial(matrices, nucleon.Leon, smoothing_scale=0.1),
    "adamw": adamw,
}


@dataclass(frozen=True)
class Cell:
    """Model, data, grids and horizons of a comparison."""

    task: Words | Images | Ripples | Regression
    grids: Mapping[str, tuple[float, ...]]  # peak rates by method, ascending
    steps: int  # T, of the longest run
    horizons: tuple[int, ...]
    decays: tuple[tuple[str, int], ...]  # peers, each decayed to a horizon
    falls: tuple[str, ...] = ("constant", "sqrt", "inverse")  # runs with an average
    between: tuple[int, ...] = ()  # further readings of f = .1, for the picture
    tuning: tuple[int, ...] = (100, 101)  # seeds that choose
    seeds: int = 10  # 0, 1, … are compared
    settings: str = ""  # the cell that the averages' settings are taken from
    margin: float = 0.02  # differences that count as equal
    seconds: float = 0.045  # of a step, a guess until a run is done
    device: str = "cpu"
    title: str = ""  # in the picture


def each(schedules: str, horizons: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Return every schedule at every horizon."""
    return tuple((name, horizon) for name in schedules.split() for horizon in horizons)


def wider(cell: Cell) -> Cell:
    """Return a cell with four times the batch and a quarter of the steps."""
    times = {"horizons": tuple(h // 4 for h in cell.horizons), "steps": cell.steps // 4}
    decays = each("linear wsd", times["horizons"])
    task = replace(cell.task, batch=4 * cell.task.batch)
    return replace(cell, task=task, decays=decays, seconds=3 * cell.seconds, **times)


RATES = (0.01, 0.02, 0.04, 0.08)
ADAMW = (0.001, 0.002, 0.004, 0.008)
AT = (150, 300, 600, 1200)
A1 = Cell(
    *(Words("tinyshakespeare/input.txt"), {"muon": RATES}, 1200, AT),
    decays=(*each("linear wsd", AT), ("cosine", 1200)),
    between=(225, 450, 900),
    title="GPT on characters of Shakespeare (A1)",
)
A2 = replace(A1, horizons=(300, 1200), decays=each("linear", (300, 1200)), falls=("sqrt",))
NOVELS = Words("eltec-eng/train_00.txt.xz", "eltec-eng/val.txt.xz")
IN = (125, 250, 500, 1000)
B = Cell(
    Images(),
    {"muon": RATES[1:]},
    1000,
    IN,
    each("linear wsd", IN),
    seconds=0.025,
    title="CNN on Fashion-MNIST (B)",
)
C = Cell(
    Ripples(),
    {"muon": (0.005, 0.01, 0.02, 0.04)},
    1000,
    IN,
    each("linear", IN),
    margin=0.0,
    seconds=0.001,
)
G = Cell(
    Words("tokens/novels", pairs=4096, layers=8, width=512, heads=8, context=256),
    *({"muon": (0.016, 0.032, 0.064)}, 2440, (610, 1220, 2440)),
    *(each("linear wsd", (610, 1220, 2440)), ("constant", "sqrt")),
    seeds=5,
    seconds=0.008,
    device="cuda",
    title="GPT of 29 M on novels (G)",
)
P = replace(G, task=replace(G.task, source="tokens/programs", pairs=8192), title="on programs (G)")
LARGE = replace(P.task, layers=16, width=768, heads=12)
CELLS: Mapping[str, Cell] = {
    "A1": A1,
    "A2": replace(A2, grids={"leon": RATES, "leon .1": RATES, "adamw": ADAMW}, between=()),
    "A3": replace(
        A1, task=NOVELS, seeds=5, settings="A1", title="GPT on characters of novels (A3)"
    ),
    "B": B,
    "C-ripples": C,
    "C-l1": replace(C, task=Regression(0.5)),
    "C-quantile": replace(C, task=Regression(0.1)),
    "G-novels-4k": G,
    "G-novels-16k": wider(G),
    "G-programs-4k": P,
    "G-programs-16k": wider(P),
    "G-126M": replace(P, task=LARGE, tuning=(100,), settings="G-programs-4k", seconds=0.03),
}
GROUPS = {
    "all": [name for name in CELLS if name[0] != "G"],
    "C": [name for name in CELLS if name[0] == "C"],
    "G": [name for name in CELLS if name[0] == "G"],
}
SMOKE = Cell(Words(), {"muon": (0.02,)}, 150, (75, 150), (("wsd", 150),), ("constant",))


def repeated(tokens: Tensor, held: Tensor, length: int = 32) -> float:
    """Return the share of the runs of tokens of a held-out text that occur in another, by hash."""
    hashes = []
    for text in (held, tokens):
        places = len(text) - length + 1
        hashed = torch.zeros(places, dtype=torch.int64)
        for k in range(length):  # modulo 2⁶⁴
            hashed = hashed * 6364136223846793005 + text[k : k + places].long() + 1
        hashes.append(hashed)
    return torch.isin(*hashes).double().mean().item()


def write_pairs(task: Words, train: str, held: str, out: Path) -> None:
    """Learn byte pairs from pieces spread over a text, and write its tokens for a task."""
    step = max(1, len(train) // 64)
    sample = "".join(train[start : start + 62_500] for start in range(0, len(train), step))
    pairs = BytePairs.learn(sample, task.pairs)
    written = []
    for part, text, limit in (("train", train, 12_000_000), ("held", held, 500_000)):
        pieces = [text[start : start + 2_000_000] for start in range(0, len(text), 2_000_000)]
        encoded = (pairs.encode(piece).to(torch.int16) for piece in pieces[: limit // 400_000])
        written.append(torch.cat(list(encoded))[:limit])
        path = out / f"{task.source}.{part}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(written[-1].numpy().tobytes())
    sizes = " and ".join(f"{len(tokens):,}" for tokens in written)
    share = f"{repeated(*written):.1%} of the held-out runs of 32 occur in the text to train on"
    print(f"{out / task.source}: {sizes} tokens; {share}", flush=True)


def write_tokens(data: Path, out: Path) -> None:
    """Write the tokens of the novels, and of torch's sources with every 25th file held out."""
    novels = [lzma.decompress(f.read_bytes()).decode() for f in sorted(data.glob("eltec-eng/*.xz"))]
    write_pairs(G.task, "".join(novels[:-1]), novels[-1], out)
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    code = [file.read_text("utf-8", errors="replace") for file in files]
    train = "".join(text for number, text in enumerate(code) if number % 25 != 24)
    write_pairs(P.task, train, "".join(code[24::25]), out)
