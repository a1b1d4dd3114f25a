"""Every Triton kernel compiles for a GPU, which the interpreter does not say; no GPU is needed."""

import os

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
triton_symmetric = pytest.importorskip("nucleon.linalg.triton_symmetric")
triton_step = pytest.importorskip("nucleon.optim.triton_step")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

TABLE, WHERE = "*i64", dict.fromkeys(("rows", "columns", "each", "inner", "stride"), "i32")
FACTORS = dict.fromkeys(("sign", "momentum", "lead", "extra"), "fp32")
TENSORS = {"gradients": TABLE, "totals": TABLE}
TYPES = {"GRADIENT": tl.bfloat16, "TOTAL": tl.float32}
WHOLE = dict.fromkeys(("rows", "depth", "product_power", "addend_power", "each"), "i32")
REAL = dict.fromkeys(("alpha", "beta", "shift", "second_shift", "addend_shift"), "fp32")
OPERANDS = dict.fromkeys(("scale", "addend_scale", "norms"), "*fp32")
SYMMETRIC = {
    "HAS_ADDEND": True,
    "HAS_SCALE": True,
    "ADDEND_TABLE": True,
    "PRECISION": "tf32",
    "REMAINDER": 2048.0,
}
# Kernel, the kinds of its arguments, its constants.
CASES = {
    "fill": (
        triton_step.fill,
        {"table": TABLE, **{f"p{i}": "i64" for i in range(triton_step.POINTERS)}},
        {},
    ),
    "look": (triton_step.look, {**TENSORS, "sums": "*fp64", **WHERE, **FACTORS}, TYPES),
    "measure": (
        triton_step.measure,
        {"sums": "*fp64", "grams": TABLE, "skipped": TABLE, "present": "*i1", "factors": "*fp32"}
        | {"taken": "*i1", "parts": "i32", "m": "i32", "each": "i32"}
        | dict.fromkeys(("keep", "smoothing", "bound", "spread", "limit", "tiny"), "fp32"),
        {"HAS_GRAM": True, "HAS_PRESENT": True, "BLOCK": 1024},
    ),
    "advance": (
        triton_step.advance,
        {**TENSORS, "factors": "*fp32", "taken": "*i1", "x": "*fp16", "scaled": "*fp16"}
        | {**WHERE, **FACTORS},
        {**TYPES, "HAS_GRAM": True, "TALL": True},
    ),
    "lengths": (
        triton_step.lengths,
        {"norms": "*fp32", "scale": "*fp32", "length": "*fp32", "parts": "i32", "m": "i32"}
        | {"spread": "fp32"},
        {"BLOCK": 1024},
    ),
    **{
        f"move by {kind}": (
            triton_step.move,
            {"weights": TABLE, "directions": "*fp16", "taken": "*i1", "rate": kind, "decay": kind}
            | WHERE,
            {"WEIGHT": tl.bfloat16, "TALL": True, "DECAYS": True, "CAUTIOUS": True}
            | {"ON_DEVICE": kind == "*fp32"},
        )
        for kind in ("fp32", "*fp32")
    },
    "the Gram matrix in place": (
        triton_symmetric._symmetric,
        {"a": "tensordesc<fp16[128,64]>", "b": "tensordesc<fp16[128,64]>", "addend": TABLE}
        | {"out": TABLE, "second": TABLE, **OPERANDS, **WHOLE, **REAL},
        {**SYMMETRIC, "OUT_TABLE": True, "HAS_NORMS": False, "KIND": "", "COPY_ENGINE": True}
        | {"TILE": 128, "DEPTH": 64},
    ),
    "the first Gram matrix of the recursion": (
        triton_symmetric._symmetric,
        {"a": "*fp16", "b": "*fp16", "addend": TABLE, "out": "*fp16", "second": "*fp16"}
        | {**OPERANDS, **WHOLE, **REAL},
        {**SYMMETRIC, "OUT_TABLE": False, "HAS_NORMS": True, "KIND": "remainder"}
        | {"COPY_ENGINE": False, "TILE": 64, "DEPTH": 64},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_kernel_compiles(case):
    kernel, kinds, constants = case
    signature = {n: kinds.get(n, "constexpr") for n in kernel.arg_names}
    source = compiler.ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=backends.GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= 227 * 1024  # of a multiprocessor of an H100
