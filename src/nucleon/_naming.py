"""Import Python objects by `package.module:name` or `file.py:name`; report unknown names."""

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

_PATTERN = re.compile(r"[^:=,]+:[^\W\d]\w*")


def unknown(kind: str, name: str, names: Collection[str]) -> tuple[str, str]:
    """Return a sentence on an unknown name, and a hint: the nearest name, or all of them."""
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the {kind}s are {', '.join(names)}"
    return f"there is no {kind} {name!r}", hint


def is_address(words: str) -> bool:
    """Return True if `words` have the form `package.module:name` or `file.py:name`."""
    return _PATTERN.fullmatch(words) is not None


def named(words: str) -> Any:
    """Import `package.module:name` or `file.py:name`; modules beside the file are found too."""
    if not is_address(words):
        raise ValueError(f"{words!r} names nothing; write package.module:name or file.py:name")
    place, _, name = words.rpartition(":")
    path = Path(place)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str((path.parent if is_file else Path()).resolve()))
    try:
        return getattr(_from_file(path) if is_file else importlib.import_module(place), name)
    except (ImportError, AttributeError, SyntaxError, OSError) as error:
        raise ValueError(f"{words} cannot be imported: {error}; check path and name") from error
    finally:
        del sys.path[0]


def _from_file(path: Path) -> ModuleType:
    """Load a file as a module, once, under a name that hides no other module."""
    path = path.resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
