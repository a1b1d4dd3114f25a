"""Triton's interpreter in a process that does nothing else: it runs the cases it reads.

    TRITON_INTERPRET=1 python tests/interpreting.py <<< "optim.step_cases<TAB>huge"

A case is named by its module and its key in `CASES`. No bfloat16: the interpreter knows its bit
patterns only. What takes most of the interpreter's time is left out.

As it comes, it puts its own functions into `triton.language` at every call of a kernel or of a
function in one, and the old ones back; it computes what would show that integers overflow, and
asserts nothing of it; and it makes the same small tables again for every operation. With small
blocks each takes as long as the kernels do.
"""

import dataclasses
import importlib
import math
import os
import sys
import traceback

import torch
import torch._dynamo  # at the first step
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


def set_up():
    """Let the kernels of the engine run on the CPU."""
    from nucleon.linalg import half, triton_symmetric
    from nucleon.optim.engines.cuda import adamw_kernels, addresses, engine, kernels

    assert triton_symmetric.INTERPRETED
    engine.runs_on = lambda device: True
    addresses.send = lambda places, table: table.copy_(torch.tensor(places))
    torch.cuda.is_current_stream_capturing = lambda: False
    adamw_kernels.PART = 4096  # the time is that of the programs, not of the entries
    begin = kernels.begin

    def checked(*operands):
        start, taken = begin(*operands)
        floor, finite = half.first_floor(start.r), start.r.isfinite().all(-1).all(-1)
        torch.testing.assert_close(start.floor[finite], floor[finite], rtol=1e-5, atol=0)
        return start, taken

    kernels.begin = checked


def status(cases, name):
    """The exit code of a fork that runs a case: it has everything imported, and may crash."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run, options = importlib.import_module(cases).CASES[name]
            run(torch.device("cpu"), **options)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for change in (patch_once, count_without_asserting, look_up_once, leave_equal_shapes, set_up):
        change()
    for line in sys.stdin:
        print("exit", status(*line.rstrip("\n").split("\t")), flush=True)
