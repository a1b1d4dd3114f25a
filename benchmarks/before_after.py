"""Write down what a redesign may change only knowingly, and compare two such files.

    python benchmarks/before_after.py FILE --parts routes,claims,launches    # add parts to FILE
    python benchmarks/before_after.py FILE --sabotage LOG --durations LOG    # of other programs
    python benchmarks/before_after.py FILE --compare OTHER
    python benchmarks/before_after.py --times SRC SRC …    # CPU steps of source trees, in turns

Routes are those of the models of transformers that the tests know, and of timm and torchvision
where they are installed, all on the meta device. Launches are those of a CUDA step whose kernels
Triton's interpreter would run: they are counted and left out. Times are ratios to the first tree.
"""

import argparse
import collections
import importlib
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/integrations"))
ENGINE = "nucleon.optim.engines.cuda"
"""The one place outside the public interface: its `runs_on` and what needs a device."""
OPTIMIZERS = {"Muon": {}, "Leon": {}, "Pion": {"samples": 2}}
GPT = [(3, 1), (1, 1), (4, 1), (1, 4)]


def families():
    """Yield the name and the maker of every model."""
    import test_census as census
    import test_models as tiny

    for name in dict.fromkeys([*census.NAMES, *census.HEADS]):
        yield name, lambda name=name: census.build(name)
    for name, options in (tiny.EXPERTS | tiny.ROUTED).items():
        yield f"{name} (tiny)", lambda name=name, options=options: tiny.build(name, options)
    try:
        import timm
        from torchvision import models
    except ImportError:
        return
    for module in timm.list_modules():
        for name in timm.list_models(module=module)[:1]:
            yield f"timm {name}", lambda name=name: timm.create_model(name)
    builders = {name: models.get_model_builder(name) for name in models.list_models()}
    for name in {builder.__module__: name for name, builder in builders.items()}.values():
        options = {"weights": None}
        if "weights_backbone" in inspect.signature(builders[name]).parameters:
            options["weights_backbone"] = None
        yield f"torchvision {name}", lambda n=name, o=options: builders[n](**o)


def routes():
    """Return the route and axes of every parameter, or why a model is refused."""
    import torch

    import nucleon

    models = {}
    for name, make in families():
        with warnings.catch_warnings(record=True) as said, torch.device("meta"):
            warnings.simplefilter("ignore")
            try:
                model = make()
            except Exception as error:
                models[name] = {"not built": type(error).__name__}
                continue
            warnings.simplefilter("always", UserWarning)
            try:
                rows = nucleon.Leon.for_model(model).explain()
            except ValueError as error:
                models[name] = {"refused": str(error)[:300]}
                continue
        found = collections.defaultdict(collections.Counter)
        for row in rows:
            head = " head" if "output head" in row.reason else ""
            found[f"{row.route}{head} {row.axes or ''}".strip()][re.sub(r"\d+", "#", row.name)] += 1
        models[name] = {
            route: " ".join(f"{p}*{n}" if n > 1 else p for p, n in names.items())
            for route, names in found.items()
        }
        if said:
            models[name]["warned"] = sorted(str(w.message)[:300] for w in said)
    return models


def claims():
    """Return name, tolerance and verdict of every check of every claim, with --quick."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "-m",
            "nucleon",
            "reproduce",
            "--all",
            "--quick",
            "--json",
            "--jobs",
            "1",
            "--output",
        ]
        done = subprocess.run([sys.executable, *command, folder], capture_output=True, text=True)
    keys = ("name", "relation", "threshold", "passed", "measured")
    return {
        run["id"]: [{key: check[key] for key in keys} for check in run["checks"]]
        for run in json.loads(done.stdout)["runs"]
    }


def network(shapes, device="cpu"):
    """A model of linear layers of these shapes, with an embedding and norms."""
    from torch import nn

    layers = [nn.Linear(n, m, device=device) for m, n in shapes]
    return nn.ModuleList([nn.Embedding(512, 64, device=device), nn.LayerNorm(64), *layers])


def launches():
    """Return how often a step launches each kernel, and calls torch but for views."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.interpreter import GridExecutor

    import nucleon
    from step import resnet50

    engine, addresses = (
        importlib.import_module(f"{ENGINE}.{name}") for name in ("engine", "addresses")
    )
    engine.runs_on = lambda device: True
    addresses.send = lambda places, table: table.copy_(torch.tensor(places))
    torch.cuda.is_current_stream_capturing = lambda: False
    counts = collections.Counter()
    GridExecutor.__call__ = lambda self, *_, **__: counts.update([self.fn.__name__])

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
            counts["torch"] += not (view or "empty" in func.__name__)
            if "mm" in func._opname:  # float16 products take a CPU long
                a, b = args[-2:]
                shape = (*a.shape[:-1], b.shape[-1])
                return kwargs["out"] if kwargs and "out" in kwargs else a.new_zeros(shape)
            return func(*args, **kwargs or {})

    found = {}
    cases = {"GPT-2, width 128": ("half", [(128 * a, 128 * b) for a, b in GPT] * 12)}
    cases["ResNet-50"] = ("half", resnet50())
    cases["ResNet-50, an eighth"] = ("auto", [(max(1, m // 8), n // 8) for m, n in resnet50()])
    for label, (method, sizes) in cases.items():
        for name, options in OPTIMIZERS.items():
            model = network(sizes)
            make = getattr(nucleon, name).for_model
            optimizer = make(model, head=None, method=method, **options)
            for _ in range(2):
                counts.clear()
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                with Counted():
                    optimizer.step()
            found[f"{label}: {name}"] = dict(sorted(counts.items()))
    return found


def steps():
    """Return the median seconds of a CPU step of each optimizer."""
    import torch

    import nucleon

    torch.set_num_threads(1)
    shapes = {"one 16x32": [(16, 32)], "GPT 2x192": [(192 * a, 192 * b) for a, b in GPT] * 2}
    shapes["24 of their own"] = [(8 + i, 40) for i in range(24)]
    found = {}
    for label, sizes in shapes.items():
        for name, options in OPTIMIZERS.items():
            torch.manual_seed(0)
            model = network(sizes)
            optimizer = getattr(nucleon, name).for_model(model, head=None, **options)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            taken = []
            for _ in range(12 if "GPT" in label else 60):
                begun = time.perf_counter()
                optimizer.step()
                taken.append(time.perf_counter() - begun)
            found[f"{label}: {name}"] = statistics.median(taken[3:])
    return found


def times(trees, rounds=7):
    """Print the steps of each source tree over those of the first, the trees in turns."""
    found = {tree: collections.defaultdict(list) for tree in trees}
    code = "import before_after, json; print(json.dumps(before_after.steps()))"
    for _ in range(rounds):
        for tree in trees:
            paths = os.pathsep.join([str(Path(tree).resolve()), str(Path(__file__).parent)])
            environment = os.environ | {"PYTHONPATH": paths}
            done = subprocess.check_output([sys.executable, "-c", code], env=environment)
            for case, seconds in json.loads(done).items():
                found[tree][case].append(seconds)
    for case, first in found[trees[0]].items():
        pairs = [zip(found[tree][case], first, strict=True) for tree in trees]
        ratios = [statistics.median(a / b for a, b in pair) for pair in pairs]
        print(f"{case:28} {min(first) * 1e3:8.3f} ms", *(f"{r:7.3f}" for r in ratios))


def sabotage(log, known):
    """Return what `make sabotage` printed: fault, claim, and the check that noticed."""
    rows = {}
    for line in Path(log).read_text(encoding="utf-8").splitlines():
        at = min((i for c in known if (i := line.find(f" {c} ", 40)) > 0), default=None)
        if at is not None and line[:2] in ("* ", "  "):
            claim, _, seen = line[at:].strip().partition(" ")
            rows[f"{line[2:at].strip()} | {claim}"] = seen.strip()
    return rows


def durations(log):
    """Return the seconds of each test file in the log of `pytest --durations=0 -vv`."""
    found = collections.Counter()
    text = Path(log).read_text(encoding="utf-8")
    for seconds, file in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +([^:\s]+)", text, re.M):
        found[file] += float(seconds)
    return {file: round(seconds, 1) for file, seconds in found.most_common()}


def compare(old, new, path=""):
    """Yield each place where two files differ, times and measured numbers apart."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if key not in ("steps", "durations", "measured", "commit"):
                yield from compare(old.get(key), new.get(key), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and all(map(is_check, old + new)):
        named = [{check["name"]: check for check in checks} for checks in (old, new)]
        yield from compare(*named, path)
    elif old != new:
        both = (json.dumps(side, ensure_ascii=False) for side in (old, new))
        yield "\n".join([path, *both])


def is_check(entry):
    """Return whether this is a check of a claim."""
    return isinstance(entry, dict) and "threshold" in entry


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--parts", default="", help="routes, claims, launches, steps")
    for name in ("sabotage", "durations", "compare"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--times", nargs="+")
    args = parser.parse_args()
    if args.times:
        return times(args.times)
    written = json.loads(args.file.read_text(encoding="utf-8")) if args.file.exists() else {}
    if args.compare:
        for line in compare(written, json.loads(args.compare.read_text(encoding="utf-8"))):
            print(line)
        return None
    for part in filter(None, args.parts.split(",")):
        written[part] = {p.__name__: p for p in (routes, claims, launches, steps)}[part]()
    if args.sabotage:
        written["sabotage"] = sabotage(args.sabotage, written["claims"])
    if args.durations:
        written["durations"] = durations(args.durations)
    text = json.dumps(written, indent=1, sort_keys=True, ensure_ascii=False)
    args.file.write_text(text + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
