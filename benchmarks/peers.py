"""Other people's Muon, installed or in a checkout: whole optimizers and bare polar factors.

    --peer dion=PATH --peer gram-newton-schulz=PATH --peer flash-muon     # the last one installed

They are run as they are published, at the arithmetic they choose themselves, but: where they or the
compiler time configurations of a kernel at every new shape, they have less time for each; functions
that they compile are compiled for each shape; and what flash-muon gathers from all ranks is its
own.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Make = Callable[[Sequence[Tensor]], Optimizer]
Direction = Callable[[Tensor], Tensor]

REPLAYED = "gram-newton-schulz"
"""Replays CUDA graphs of its own in every call, and cannot be captured in another."""
OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0, "nesterov": False, "adjust_lr": None}


def load(entries: Sequence[str]) -> tuple[dict[str, Make], dict[str, Direction], dict[str, str]]:
    """Return optimizers, directions and versions by name of every peer, NAME or NAME=PATH."""
    torch._dynamo.config.recompile_limit = 64  # they compile once a shape,
    torch._dynamo.config.automatic_dynamic_shapes = False  # and for that shape
    optimizers: dict[str, Make] = {}
    directions: dict[str, Direction] = {}
    versions: dict[str, str] = {}
    for entry in entries:
        name, _, path = entry.partition("=")
        if name not in KNOWN or (path and not Path(path).is_dir()):
            raise SystemExit(f"--peer is NAME or NAME=FOLDER, NAME of {', '.join(KNOWN)}: {entry}")
        if path:
            sys.path.insert(0, path)
        try:
            KNOWN[name](optimizers, directions)
        except ModuleNotFoundError as error:
            raise SystemExit(f"--peer {entry}: {error}; install it, or give NAME=FOLDER") from error
        versions[name] = version(name, path)
        if name == REPLAYED and name in optimizers:  # with the kernels of that package
            versions["quack"] = metadata.version("quack-kernels")
    return optimizers, directions, versions


def version(name: str, path: str) -> str:
    """Return the version of an installed peer, or the commit or a digest of a folder."""
    if not path:
        return metadata.version(name)
    if (Path(path) / ".git").exists():
        asked = ["git", "-C", path, "log", "-1", "--format=%H"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    digest = hashlib.sha256()
    for file in sorted(Path(path).rglob("*.py")):
        digest.update(file.relative_to(path).as_posix().encode() + file.read_bytes())
    return f"sha256:{digest.hexdigest()[:16]} of its Python files"


def _tune_briefly(module: ModuleType) -> Callable[..., Any]:
    """Shorten the timing of the configurations of a module's Triton kernels; return the timer."""
    import triton
    from triton.runtime.autotuner import Autotuner

    brief = partial(triton.testing.do_bench, warmup=3, rep=12)
    for kernel in vars(module).values():
        if isinstance(kernel, Autotuner):
            kernel._do_bench = brief
    return brief


def _dion(optimizers: dict[str, Make], directions: dict[str, Direction]) -> None:
    from dion import Muon
    from dion import newton_schulz_triton as newton_schulz_triton_module
    from dion.newton_schulz_triton import newton_schulz_triton, newton_schulz_triton_fast
    from dion.polar_express import polar_express_triton
    from torch._inductor.runtime.benchmarking import benchmarker

    # Each of their 30 configurations is timed for 65 to 125 ms at every new shape, by Triton or,
    # where the kernel is part of a compiled function, by the compiler: minutes for a network of
    # many shapes. The compiler's timer is everybody's; what it chose in an earlier process, perhaps
    # on a busy device, is not taken.
    brief = _tune_briefly(newton_schulz_triton_module)
    benchmarker.benchmark_gpu = lambda call, **_: brief(call)
    torch._inductor.config.autotune_local_cache = False

    own: dict[str, Direction] = {
        "dion Polar Express": polar_express_triton,
        "dion Newton-Schulz": newton_schulz_triton,
        "dion fast Newton-Schulz": newton_schulz_triton_fast,  # four steps; never chosen by itself
    }
    directions |= own
    optimizers |= {name: partial(_dion_muon, Muon, call) for name, call in own.items()}


def _dion_muon(muon: Any, direction: Direction, params: Sequence[Tensor]) -> Optimizer:
    return muon(list(params), mu=0.95, newton_schulz_func=direction, **OPTIONS)


def _gram_newton_schulz(optimizers: dict[str, Make], directions: dict[str, Direction]) -> None:
    from gram_newton_schulz import GramNewtonSchulz, Muon

    try:  # its own kernels are those of the package quack
        from quack import autotuner

        # 44 configurations, each warmed up for 200 ms and timed for 200 calls; that a fifth finds
        # the same one is assumed.
        bench = autotuner._bench_cuda_graph_l2_rotate
        bench = partial(bench, warmup_target_ms=20, n_timed_calls=40)
        autotuner._bench_cuda_graph_l2_rotate = bench
        kernels = True
    except (ImportError, OSError, AttributeError):  # none, or another version
        kernels = False
    label = "gram-newton-schulz" + ("" if kernels else " (torch products)")
    more = {"ns_use_kernels": kernels, "gram_newton_schulz_restart_iterations": [2]}
    optimizers[label] = lambda p: Muon(list(p), momentum=0.95, **more, **OPTIONS)
    whole = GramNewtonSchulz(ns_use_kernels=kernels, compile_kwargs=None)
    directions[label] = torch.compile(whole.__call__, fullgraph=True)


def _flash_muon(optimizers: dict[str, Make], directions: dict[str, Direction]) -> None:
    import flash_muon.muon as module
    from flash_muon import matmul_transpose_triton

    _tune_briefly(matmul_transpose_triton)

    # It takes one matrix at a time, and gathers each update from all ranks: here its own.
    def gathered(out: Tensor, own: Tensor, async_op: bool) -> SimpleNamespace:
        out.copy_(own.view_as(out))
        return SimpleNamespace(wait=lambda: None)

    module.dist = SimpleNamespace(all_gather_into_tensor=gathered)
    alone = {"momentum": 0.95, "rank": 0, "world_size": 1}
    options = {key: value for key, value in OPTIONS.items() if key != "adjust_lr"}
    optimizers["flash-muon"] = lambda p: module.Muon(list(p), **alone, **options)
    directions["flash-muon"] = lambda s: torch.stack([module.fast_newtonschulz(x) for x in s])


KNOWN = {"dion": _dion, "gram-newton-schulz": _gram_newton_schulz, "flash-muon": _flash_muon}
