"""Names of a package that load on first use, by PEP 562's `__getattr__` of a module."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def attach(
    package: str, listed: Collection[str], sources: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Type checkers see the same names by imports under `if TYPE_CHECKING`.

    Args:
        package: its `__name__`.
        listed: its `__all__`, which may name modules of the package.
        sources: module of the package → the names to load from it, separated by spaces.
    """
    source = {name: module for module, names in sources.items() for name in names.split()}

    def load(name: str) -> Any:
        module = f"{package}.{source.get(name, name)}"
        if find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = import_module(module)
        except AttributeError as error:  # `from package import name` would hide it
            raise ImportError(f"{module} cannot be imported: {error}") from error
        value = getattr(value, name) if name in source else value
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *listed})

    return load, names
