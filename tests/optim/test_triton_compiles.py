"""Every Triton kernel compiles for a GPU, which the interpreter does not say; no GPU is needed."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from soaking import SOAK

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
triton_symmetric = pytest.importorskip("nucleon.linalg.triton_symmetric")
kernels = pytest.importorskip("nucleon.optim.engines.cuda.kernels")
adamw_kernels = pytest.importorskip("nucleon.optim.engines.cuda.adamw_kernels")
perturbed = pytest.importorskip("nucleon.optim.engines.cuda.perturbed")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TABLE = "*i64"
SIDES = ("i_stride", "j_stride", "i_size", "i_within", "j_size", "j_within")
KINDS = {
    name: kind
    for kind, names in {
        TABLE: ("gradients", "totals", "skipped", "quiet", "grams", "streams", "steps", "weights"),
        "*i1": ("mask", "taken"),
        "*i32": ("broken", "owners", "numbers"),
        "*fp16": ("x", "y", "z", "r", "root", "scaled", "directions"),
        "*fp32": (
            *("factors", "norms", "scale", "addend_scale", "length", "factor", "counts", "shares"),
        ),
        "*fp64": ("sums", "lr"),
        "i32": (
            *("m", "n", "each", "inner", *SIDES, "parts", "longest", "entries", "pairs", "first"),
            *("j", "width", "count", "depth", "product_power", "addend_power"),
        ),
        "i64": ("key",),
        "fp32": (
            *("sign", "momentum", "lead", "extra", "settled", "falls", "keep", "smoothing"),
            *("bound", "copies", "spread", "limit", "tiny", "least", "most", "shift", "jitter"),
            *("less", "blend", "enter", "eps", "alpha", "beta", "second_shift", "addend_shift"),
        ),
        "fp64": ("log_beta1", "log_beta2"),
    }.items()
    for name in names
}
"""Kinds of the arguments of kernels by their names."""
FIRST = {"HAS_SCALE": True, "HAS_NORMS": True, "KIND": "remainder"}
FOLDED = {"I_FOLDED": False, "J_FOLDED": True}
TYPES = {"GRADIENT": tl.bfloat16, "TOTAL": tl.float32, "GRADIENT_BYTES": 2, "TOTAL_BYTES": 16}
TYPES |= FOLDED
SHARED = {"GRADIENT": tl.bfloat16, "WEIGHT": tl.bfloat16, "CHUNK": 8192}


def symmetric(tile, depth, *, addend="engine", out="engine", engine=True, **more):
    """Constants and kinds of the symmetric kernel: a product αABᵀ + βC of float16."""
    operand, box = f"tensordesc<fp16[1,{tile},{depth}]>", f"tensordesc<fp16[1,{tile},{tile}]>"
    at = {"engine": box, "table": TABLE, "pointer": "*fp16", "": "*fp16"}
    kinds = dict.fromkeys(("a", "b"), operand if engine else "*fp16")
    kinds |= {"addend": at[addend], "out": at[out], "second": at[out], "rows": "i32"}
    constants = {"ADDEND": "last" if addend == "table" else "first" if addend else ""}
    constants |= {"ADDEND_AT": addend, "OUT_AT": out, "COPY_ENGINE": engine, "KIND": ""}
    constants |= dict.fromkeys(("HAS_SCALE", "HAS_NORMS"), False)
    return constants | {"TILE": tile, "DEPTH": depth, "TABLE_BYTES": 16, **more}, kinds


# Kernel, its constants, and kinds of its arguments that others have otherwise.
CASES = {
    "sum_squares": (kernels.sum_squares, {**TYPES, "MASKED": True, "LOOKAHEAD": True}),
    "measure": (
        kernels.measure,
        {"HAS_GRAM": True, "MASKED": True, "BLOCK": 1024, "TABLE_BYTES": 4},
    ),
    "advance": (kernels.advance, {**TYPES, "HAS_GRAM": True}),
    "small": (
        kernels.step_small,
        {**TYPES, "GRADIENT": tl.float32, "HAS_GRAM": True, "MASKED": True, "LOOKAHEAD": True}
        | {"POLYNOMIALS": (3.0, -2.0, 0.5) * 5, "STEPS": 5, "M": 16, "N": 64, "TABLE_BYTES": 4},
        {"directions": "*fp32", "floor": "fp32"},
    ),
    "lengths": (kernels.lengths, {"WATCHED": True, "BLOCK": 1024}, {"floor": "*fp32"}),
    "draw": (perturbed.draw, {"DRAWS": 4, "BLOCK": 1024}),
    "cholesky_column": (perturbed.cholesky_column, {"SIDE": 64, "DEPTH": 32, "TABLE_BYTES": 16}),
    "diagonal_fallback": (perturbed.diagonal_fallback, {"SIDE": 64, "TABLE_BYTES": 4}),
    **{
        f"perturb {how} the copy engine": (
            perturbed.perturb,
            {"DRAWS": 2, "COPY_ENGINE": how == "by", "TILE": 128, "DEPTH": 64},
            kinds,
        )
        for how, kinds in (
            ("by", {"root": "tensordesc<fp16[1,128,64]>", "z": "tensordesc<fp16[1,64,128]>"}),
            ("without", {}),
        )
    },
    **{
        f"move by {kind}": (
            kernels.move,
            {**FOLDED, "WEIGHT": tl.bfloat16, "BYTES": 16, "DECAYS": True}
            | {"ON_DEVICE": kind == "*fp32"},
            {"rate": kind, "decay": kind},
        )
        for kind in ("fp32", "*fp32")
    },
    "AdamW's look": (adamw_kernels.look, SHARED, {"rows": TABLE}),
    "AdamW's decide": (adamw_kernels.decide, {"BLOCK": 128}, {"rows": TABLE, "decay": "fp64"}),
    "AdamW's update": (adamw_kernels.update, {**SHARED, "PART": 1024}, {"rows": TABLE}),
    "the average": (
        adamw_kernels.enter,
        {"TYPE": tl.bfloat16, "CHUNK": 4096},
        {"table": TABLE},
    ),
    "the first Gram matrix without the copy engine": (
        triton_symmetric._symmetric,
        *symmetric(64, 64, addend="table", out="pointer", engine=False, **FIRST),
    ),
}


def compiled(kernel, constants, kinds=None, **options):
    kinds = KINDS | (kinds or {})
    signature = {n: "constexpr" if n in constants else kinds[n] for n in kernel.arg_names}
    # As a launch finds them: addresses and sizes that are multiples of 16.
    whole = [
        (i,)
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("rows", "depth")
    ]
    attributes = {place: [["tt.divisibility", 16]] for place in whole}
    source = compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=backends.GPUTarget("cuda", 90, 32), options=options)


ONE_EACH = {case[0]: name for name, case in reversed(CASES.items())}.values()
"""The first case of each kernel, which `make test` compiles; `make soak` compiles all."""


@pytest.mark.parametrize("name", CASES if SOAK else sorted(ONE_EACH))
def test_the_kernel_compiles(name):
    found = compiled(*CASES[name])
    assert found.asm["cubin"]
    assert found.metadata.shared <= 227 * 1024  # of a multiprocessor of an H100


PRODUCTS = {
    "XXᵀ": {"addend": ""},
    "αAB + βC": {},
    "with a shifted second": {"HAS_SCALE": True, "KIND": "shifted"},
    "the first Gram matrix": {"addend": "table", **FIRST},
    "the Gram matrix in place": {"addend": "table", "out": "table", "HAS_SCALE": True},
    "Pion's first Gram matrix": {"addend": "", **FIRST},
}
PRECISE = ("the first Gram matrix", "Pion's first Gram matrix", "the Gram matrix in place")
"""Once a step each; only large tiles."""
TWO_FIT = [c for c in triton_symmetric.CONFIGS if c.kwargs["TILE"] == 128 != c.kwargs["DEPTH"]]
TWO_FIT = TWO_FIT[: None if SOAK else 1]
TILED = [
    *((config, name) for config in TWO_FIT for name in PRODUCTS if name not in PRECISE),
    *((triton_symmetric.LARGE, name) for name in PRECISE),
]


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton comes without cuobjdump")
@pytest.mark.parametrize(
    ("config", "name"),
    TILED,
    ids=lambda x: x if isinstance(x, str) else f"{x.num_warps} warps",
)
def test_the_product_keeps_what_it_sums_in_registers(config, name, tmp_path):
    """Spilled registers once made it slower than a full product by cuBLAS."""
    tiles = config.kwargs["TILE"], config.kwargs["DEPTH"]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    case = symmetric(*tiles, **PRODUCTS[name])
    found = compiled(triton_symmetric._symmetric, *case, **options)
    file = tmp_path / "kernel.cubin"
    file.write_bytes(found.asm["cubin"])
    said = subprocess.run(
        [CUOBJDUMP, "-res-usage", file], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said).groups())
    # Bytes a thread. Of a kernel that spills its sums, thousands; those that add a float32 matrix
    # in the end, once a step each, may lack a few dozen registers.
    assert stack <= (256 if name in PRECISE else 64)
    if name not in PRECISE:
        assert 2 * 32 * config.num_warps * registers <= 65536  # two programs fit
        assert 2 * found.metadata.shared <= 227 * 1024


@pytest.mark.parametrize(("dtype", "width"), [(tl.float32, 4), (tl.bfloat16, 2)], ids=str)
def test_adamw_moves_four_entries_at_a_time(dtype, width):
    """Vectors of 16 bytes of each moment, and as many entries of gradient and weights."""
    constants = {**SHARED, "GRADIENT": dtype, "WEIGHT": dtype, "PART": 1024}
    kinds = {"rows": TABLE}
    code = compiled(adamw_kernels.update, constants, kinds, num_warps=4).asm["ptx"]
    loads, stores = [re.findall(rf"{what}\.global\S*\.v(\d)\.b32", code) for what in ("ld", "st")]
    # 8 entries per thread. m, v: twice 2 loads; weights: twice 2; gradients, where aligned: 2.
    # Twice: the branch with the gradient in a flat buffer loads those one by one.
    per_thread = 1024 // 128 // 4
    moments = 2 * 2 * per_thread
    assert loads.count("4") + loads.count("2") == moments + 3 * per_thread
    assert stores.count("4") + stores.count("2") == moments + 2 * per_thread
    assert loads.count(str(width)) >= 3 * per_thread
