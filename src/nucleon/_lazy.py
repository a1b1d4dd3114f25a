"""Names of a package that load on first use, by PEP 562's `__getattr__` of a module."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
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
        if name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(f"{package}.{source.get(name, name)}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":  # a dependency of the module is missing
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        value = getattr(module, name) if name in source else module
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *listed})

    return load, names
