"""Import Python objects by `package.module:name` or `file.py:name`; report unknown names."""

import difflib
import importlib
import re
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
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
    place, _, name = words.rpartition(":")
    path = Path(place)
    is_file = path.suffix == ".py"
    sys.path.insert(0, str((path.parent if is_file else Path()).resolve()))
    try:
        if is_file:
            return runpy.run_path(place)[name]
        return getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, KeyError, SyntaxError, OSError) as error:
        raise ValueError(f"{words} cannot be imported: {error}; check path and name") from error
    finally:
        del sys.path[0]
