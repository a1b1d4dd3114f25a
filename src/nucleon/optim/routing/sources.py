"""The syntax trees of functions whose source is there."""

import ast
import inspect
import linecache
import textwrap
from types import FunctionType
from weakref import WeakKeyDictionary

_PARSED: "WeakKeyDictionary[FunctionType, ast.FunctionDef | None]" = WeakKeyDictionary()
"""Held no longer than the functions, which a notebook makes anew with each run of a cell."""


def parsed(function: FunctionType) -> ast.FunctionDef | None:
    """The tree of a function; None without source, and of a lambda or a coroutine."""
    if function not in _PARSED:
        _PARSED[function] = _parse(function)
    return _PARSED[function]


def _parse(function: FunctionType) -> ast.FunctionDef | None:
    code = inspect.unwrap(function).__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if len(lines) < code.co_firstlineno:
        return None
    block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    tree = ast.parse(textwrap.dedent("".join(block))).body[0]
    return tree if isinstance(tree, ast.FunctionDef) else None
