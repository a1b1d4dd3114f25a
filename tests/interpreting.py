"""Triton's interpreter for a process that does nothing else: the language is patched once.

As it comes, it puts its own functions into `triton.language` at every call of a kernel or of a
function in one, and the old ones back: with small blocks that takes as long as the kernels do.
"""

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


patch_once()
