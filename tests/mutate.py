"""Small random faults in the source, each held to the tests of its file: `make mutate`.

    python tests/mutate.py --count 40 --seed 0

A mutant changes one operator, constant, sign, `not` or order of two arguments in one file of
`TESTS`, outside messages, annotations and decorators. The tests run against a copy of `src`.
"""

import argparse
import ast
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from shutil import copytree
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/nucleon"
TESTS = {  # of each file; the first failure ends a run, so the likeliest come first
    "moments.py": ["tests/test_moments.py"],
    "online/potentials.py": ["tests/online/test_potentials.py"],
}
_ENGINE = ("contract", "certify", "oracles")
TESTS["optim/engines/reference.py"] = [f"tests/optim/test_{name}.py" for name in _ENGINE]
for _path in sorted((PACKAGE / "linalg").glob("*.py")):
    if _path.name not in ("__init__.py", "kernels.py", "triton_symmetric.py"):
        TESTS[f"linalg/{_path.name}"] = ["tests/linalg"]

SWAPPED = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.BitAnd: ast.BitOr, ast.And: ast.Or}
SWAPPED |= {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
SWAPPED |= {value: key for key, value in SWAPPED.items()}
SWAPPED |= {ast.Pow: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.USub: ast.UAdd}
SWAPPED |= {ast.Lt: ast.GtE, ast.GtE: ast.Gt, ast.Gt: ast.LtE, ast.LtE: ast.Lt}
UNCHANGED = ("cast", "isinstance", "issubclass", "TypeVar", "warn")  # calls


def changes(node: ast.AST) -> Iterator[tuple[Any, str, Any]]:
    """Yield every small fault of a tree: a node, its field and the new value."""
    fixed = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in UNCHANGED
    if fixed or isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return
    is_union = getattr(getattr(node, "right", None), "id", "a")[0].isupper()
    if (kind := type(getattr(node, "op", None))) in SWAPPED and not is_union:
        yield node, "op", SWAPPED[kind]()
    elif isinstance(node, ast.UnaryOp):
        yield node, "operand", ast.UnaryOp(node.op, node.operand)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        yield node, "ops", [SWAPPED[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(value := getattr(node, "value", None), (bool, int, float)):
        yield node, "value", not value if isinstance(value, bool) else 2 * value if value else 1
    elif isinstance(node, ast.Call) and len(node.args) == 2:
        yield node, "args", node.args[::-1]
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from changes(child)


def passes(tests: list[str], source: Path, seconds: float | None) -> bool:
    """Return True if the tests pass with the package in `source` within the time limit."""
    defaults = {"HYPOTHESIS_PROFILE": "quick", "OMP_NUM_THREADS": "1"} | dict(os.environ)
    environment = defaults | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *dict.fromkeys(tests)]
    where = {"cwd": ROOT, "env": environment, "stdout": subprocess.DEVNULL, "timeout": seconds}
    try:
        return subprocess.call([sys.executable, "-m", "pytest", *options], **where) == 0
    except subprocess.TimeoutExpired:
        return False


def main(count: int, seed: int) -> None:
    """Run `count` mutants, drawn from each set of tests in turn, and print each verdict."""
    trees = {file: ast.parse((PACKAGE / file).read_text()) for file in TESTS}
    rooms: dict[str, list[Any]] = {}
    for file, tree in trees.items():
        rooms.setdefault(TESTS[file][0], []).extend((file, change) for change in changes(tree))
    for sites in rooms.values():
        random.Random(seed).shuffle(sites)
    drawn = [site for turn in zip_longest(*rooms.values()) for site in turn if site][:count]
    with tempfile.TemporaryDirectory() as folder:
        copy, began = Path(copytree(ROOT / "src", Path(folder, "src"))), time.monotonic()
        if not passes([test for file, _ in drawn for test in TESTS[file]], copy, None):
            sys.exit("the tests fail without a fault; mend them first")
        limit, killed = 10 + 2 * (time.monotonic() - began), 0
        for file, (node, name, value) in drawn:
            path, before, old = copy / "nucleon" / file, ast.unparse(node), getattr(node, name)
            source = path.read_text()
            setattr(node, name, value)
            path.write_text(ast.unparse(trees[file]))
            verdict = "survived" if passes(TESTS[file], copy, limit) else "killed"
            change = f"{before} → {ast.unparse(node)} | {source.splitlines()[node.lineno - 1]}"
            print(f"{verdict:8} src/nucleon/{file}:{node.lineno} | {change}", flush=True)
            killed += verdict == "killed"
            setattr(node, name, old)
            path.write_text(source)
    print(f"{killed} of {len(drawn)} mutants killed; seed {seed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
