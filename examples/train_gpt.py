"""Train a small GPT on a text with one optimizer, without a horizon: the average is the model.

    python examples/train_gpt.py                                 # two minutes on a CPU
    python examples/train_gpt.py --text novel.txt --width 256 --steps 5000 --folder runs/novel
    torchrun --nproc-per-node 2 examples/train_gpt.py            # DDP, the matrices shared out

Without --text it learns sentences of a small grammar, whose entropy is known: no model can have a
lower loss. The rate falls like an inverse square root and does not know --steps; evaluated, drawn
from and saved in model.pt is the average of the iterates, which may be read at any time. With
--folder a checkpoint of the run itself is saved too, and the same command with more --steps resumes
from it, on any number of processes. At the end comes the certificate: the regret of each matrix
beside the bound of its theorem.
"""

import argparse
import math
import os
import random
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import nucleon
from nucleon.optim import consolidate

# ------------------------------------------------------------------ the text

# A verb agrees with its noun, also across a clause: "the owls that see the cat hear a small bird."
GRAMMAR = {
    "TEXT": ["ONE VERBs THING. ", "MANY VERB THING. "],
    "ONE": ["the NOUN", "a ADJECTIVE NOUN", "the NOUN that VERBs THING"],
    "MANY": ["the NOUNs", "some ADJECTIVE NOUNs", "the NOUNs that VERB THING"],
    "THING": ["ONE", "MANY", "nothing"],
    "NOUN": ["owl", "cat", "bird", "river", "stone", "lantern", "sailor", "garden"],
    "ADJECTIVE": ["small", "green", "silent", "broken", "patient", "wandering"],
    "VERB": ["see", "hear", "follow", "remember", "paint"],
}


def sentences(size: int, seed: int = 0) -> tuple[str, float]:
    """Return at least `size` characters of the grammar, and their entropy in nats a character."""
    generator, pieces, length, nats = random.Random(seed), list[str](), 0, 0.0
    while length < size:
        symbols = ["TEXT"]
        while symbols:
            symbol = symbols.pop()
            if symbol in GRAMMAR:
                nats += math.log(len(GRAMMAR[symbol]))
                symbols += reversed(re.findall("[A-Z]+|[^A-Z]+", generator.choice(GRAMMAR[symbol])))
            else:
                pieces.append(symbol)
                length += len(symbol)
    return "".join(pieces), nats / length


class Text:
    """Characters as tokens; the last tenth is held out."""

    def __init__(self, text: str, context: int) -> None:
        self.characters, self.context = sorted(set(text)), context
        number = {character: i for i, character in enumerate(self.characters)}
        tokens = torch.tensor([number[character] for character in text])
        self.tokens, self.held_out = tokens.tensor_split([len(tokens) * 9 // 10])
        if len(self.held_out) <= context:
            raise SystemExit(f"the text has {len(text)} characters: give more, or less --context")

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """Return windows at places that depend on seed and step alone: (size, context + 1)."""
        generator = torch.Generator().manual_seed(hash((seed, step)))
        starts = torch.randint(len(self.tokens) - self.context, (size,), generator=generator)
        return self.tokens[starts[:, None] + torch.arange(self.context + 1)]

    def judged(self, count: int = 64) -> Tensor:
        """Return windows spread evenly over the held-out part: (count, context + 1)."""
        starts = torch.linspace(0, len(self.held_out) - self.context - 1, count).long()
        return self.held_out[starts[:, None] + torch.arange(self.context + 1)]


# ------------------------------------------------------------------ the model


class Block(nn.Module):
    """x + attention(norm x), then x + perceptron(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, context, width) → the same."""
        y = self.attention_norm(x)
        q, k, v = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.perceptron_norm(x))))


class GPT(nn.Module):
    """Tokens (batch, context) → logits of the next ones."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding, self.position = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.embedding, self.position, self.head):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) → (batch, length, vocabulary)."""
        place = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position(place))))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a character; in bfloat16 on a GPU."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.is_cuda):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def continued(model: nn.Module, tokens: Tensor, context: int, count: int) -> Tensor:
    """Return the tokens, and `count` more that the model draws."""
    for _ in range(count):
        probabilities = model(tokens[-context:][None])[0, -1].float().softmax(-1)
        tokens = torch.cat((tokens, probabilities.multinomial(1)))
    return tokens


# ------------------------------------------------------------------ the run


class Run:
    """Model, optimizer and step of a run, and the file that they are kept in."""

    def __init__(self, chosen: argparse.Namespace, text: Text, device: torch.device) -> None:
        self.step, self.text, self.device = 0, text, device
        self.path = None if chosen.folder is None else chosen.folder / "checkpoint.pt"
        shape = {name: getattr(chosen, name) for name in ("context", "layers", "heads", "width")}
        self.facts = {
            **shape,
            "characters": "".join(text.characters),
            "optimizer": chosen.optimizer,
        }
        torch.manual_seed(chosen.seed)
        self.model = GPT(len(text.characters), **shape).to(device)
        # A gradient above the bound is no error: the certificate measures the excess.
        certified = {"gradient_bound": chosen.gradient_bound, "certify": True}
        self.optimizer = nucleon.create(
            chosen.optimizer,
            self.model,
            lr=chosen.lr,
            average=chosen.average,
            placement="owner" if dist.is_initialized() else "local",
            **(certified if chosen.optimizer == "leon" else {}),
        )
        self.schedule = LambdaLR(self.optimizer, lambda t: (1 + t / chosen.timescale) ** -0.5)

    def save(self) -> None:
        """Write average and checkpoint, each whole; every rank must call this, rank 0 writes."""
        state = consolidate(self.optimizer)  # {} on the other ranks
        if self.path is None or not state:
            return
        run = {"model": self.model, "schedule": self.schedule}
        kept = {name: part.state_dict() for name, part in run.items()}
        kept |= {"step": self.step, "facts": self.facts, "optimizer": state}
        average = self.optimizer.averaged_state_dict(self.model)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for path, content in ((self.path.with_name("model.pt"), average), (self.path, kept)):
            torch.save(content, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)

    def load(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.path is None or not self.path.exists():
            return
        kept = torch.load(self.path, map_location="cpu", weights_only=True)
        if kept["facts"] != self.facts:
            raise SystemExit(f"{self.path} is of another text or model: choose another --folder")
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.schedule.load_state_dict(kept["schedule"])
        self.step = kept["step"]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss of the average on the held-out text."""
        with self.optimizer.averaged():
            return loss_of(self.model, self.text.judged().to(self.device)).item()

    def train(self, chosen: argparse.Namespace, console: Console) -> None:
        """Train from the present step to the last one."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        parallel = DistributedDataParallel(self.model) if world > 1 else self.model
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            bar = progress.add_task("", total=chosen.steps, completed=self.step)
            while self.step < chosen.steps:
                windows = self.text.batch(self.step, chosen.batch, chosen.seed)[rank::world]
                loss = loss_of(parallel, windows.to(self.device))
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), chosen.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.step += 1
                progress.advance(bar)
                if self.step % chosen.log_every == 0 or self.step == chosen.steps:
                    progress.update(bar, description=f"loss {loss.item():.3f}")
                    console.print(f"step {self.step:5}   held-out loss {self.evaluate():.4f}")
                    self.save()


def certificate(optimizer: torch.optim.Optimizer) -> Table:
    """Return the regret of each matrix beside its bound."""
    table = Table("matrix", "regret", "bound", "holds", title="Certificate")
    for name, certificate in optimizer.certificates().items():
        figures = (f"{float(x):.1f}" for x in (certificate.regret, certificate.bound))
        table.add_row(name, *figures, "yes" if certificate.holds else "no")
    return table


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, help="a text file (default: a small grammar)")
    parser.add_argument("--folder", type=Path, help="keeps the checkpoint (default: none)")
    parser.add_argument("--optimizer", default="leon", choices=("muon", "leon", "pion"))
    parser.add_argument("--lr", type=float, default=0.03, help="first rate of the hidden matrices")
    parser.add_argument("--timescale", type=float, default=50, help="steps until it falls")
    parser.add_argument("--average", type=float, default=0.1, help="mean age, a part of the run")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--gradient-bound", type=float, default=0.02, help="of Leon's theorem")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("steps", 600), ("batch", 32), ("context", 64), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("heads", 4), ("width", 128), ("seed", 0), ("log-every", 100)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()

    device = torch.device(chosen.device)
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    console = Console(quiet=dist.is_initialized() and dist.get_rank() > 0)
    if chosen.text is None:
        content, entropy = sentences(300_000)
        console.print(f"sentences of a grammar: no loss is below {entropy:.4f} nats a character")
    else:
        content = chosen.text.read_text(encoding="utf-8", errors="replace")
    run = Run(chosen, Text(content, chosen.context), device)
    console.print(str(run.optimizer.explain()), highlight=False, soft_wrap=True)
    run.load()
    run.train(chosen, console)
    if chosen.optimizer == "leon":
        console.print(certificate(run.optimizer))
    start = run.text.held_out[: chosen.context].to(device)
    with run.optimizer.averaged():
        drawn = continued(run.model, start, chosen.context, 200)[chosen.context :]
    console.print("".join(run.text.characters[token] for token in drawn), style="italic")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
