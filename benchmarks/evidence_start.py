"""The model that fine-tuning begins with: trained once, the same one again wherever that can be.

Its weights are no part of a log. They are kept in a file beside the corpora; where that is gone
they are trained anew with sums in a fixed order, and every line of the log has their hash.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic

from evidence_stages import Stage, Trial
from evidence_training import Texts, Training
from nucleon._files import replacing


@dataclass(frozen=True, eq=False)
class Start:
    """Trained weights, and their loss on the text they were trained on."""

    weights: dict[str, Tensor]
    loss: float
    fingerprint: str


def trained(stage: Stage, trial: Trial, texts: Texts, kept: Path) -> Start:
    """The model of a run, from its file or trained.

    Args:
        stage: whose run.
        trial: the run.
        texts: of the stage.
        kept: the file; one of another run, text or torch is written anew.
    """
    about = asdict(trial) | {"corpus": texts.fingerprint, "torch": str(torch.__version__)}
    device = texts.tokens.device
    found: dict[str, Any] = {}
    if kept.exists():
        found = torch.load(kept, map_location=device, weights_only=True)
    if found.get("about") != about:
        with in_fixed_order():
            lane = Training(stage, trial, texts)
            while not lane.over:
                lane.advance()
            loss = lane.results()["final_loss"]
        weights = {name: value.detach() for name, value in lane.model.state_dict().items()}
        found = {"about": about, "loss": loss, "weights": weights}
        with replacing(kept) as temporary:
            torch.save(found, temporary)
    return Start(found["weights"], found["loss"], fingerprint(found["weights"]))


def fingerprint(weights: dict[str, Tensor]) -> str:
    """The first digits of a hash of all values."""
    content = hashlib.sha256()
    for name, value in sorted(weights.items()):
        content.update(name.encode())
        content.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()[:12]


@contextmanager
def in_fixed_order() -> Iterator[None]:
    """Have torch add in the same order every time, and warn where it cannot.

    Attention is written out in products: its fused gradients add in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
