"""Claims of Appendix A: rotations, quasi-Newton steps, training.

Imports the library and the engine of claims, not `report` or `cli`.
"""

from importlib import import_module
from typing import Any


def needed(module: str, package: str) -> Any:
    """Import a module of a package that the library itself does not need."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this claim needs {package}: pip install {package}") from error
