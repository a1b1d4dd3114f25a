"""Triton's interpreter for a process that does nothing else, without what takes most of its time.

As it comes, it puts its own functions into `triton.language` at every call of a kernel or of a
function in one, and the old ones back; it computes what would show that integers overflow, and
asserts nothing of it; and it makes the same small tables again for every operation. With small
blocks each takes as long as the kernels do.
"""

import dataclasses
import math

import triton.language as tl
from triton.runtime import interpreter


class Kept:
    """Patches that are never taken back."""

    def restore(self) -> None:
        """Leave them: everything here is interpreted."""


def patch_once() -> None:
    """Let all functions of a module be patched with the first of them."""
    patch, done = interpreter._patch_lang, set()

    def patched(fn):
        module = id(fn.__globals__)
        if module not in done:
            done.add(module)
            patch(fn)
        return Kept()

    interpreter._patch_lang = patched


def count_without_asserting() -> None:
    """Leave out the conditions that only `debug` looks at."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_up_once() -> None:
    """Remember NumPy's dtype of every scalar type, and the shapes of blocks in constants."""
    of_type, known, shapes = interpreter._get_np_dtype, {}, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = of_type(dtype)
        return known[name]

    def begin(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.constexpr(math.prod(shape)), tl.tuple(map(tl.constexpr, shape))
        self.numel, self.shape = shapes[shape]

    interpreter._get_np_dtype, tl.tensor.__init__ = np_dtype, begin


def leave_equal_shapes() -> None:
    """Compare two shapes before they are broadcast entry by entry."""
    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value

    def compared(lhs, rhs):
        a, b = lhs.type, rhs.type
        blocks = a.is_block(), b.is_block()
        if not any(blocks) or (all(blocks) and a.shape.values == b.shape.values):
            return lhs, rhs
        return broadcast(lhs, rhs)

    semantic.broadcast_impl_value = compared


patch_once()
count_without_asserting()
look_up_once()
leave_equal_shapes()
