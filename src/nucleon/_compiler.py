"""What is said to torch.compile without importing it: that takes longer than torch itself."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.assume_constant_result`: the compiler calls `function`, and keeps the value.

    That one imports the compiler to set this attribute; a test holds the two to each other.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
