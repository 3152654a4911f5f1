"""Compiles the Triton kernels for a GPU that need not be there, and prints what came of it as JSON, one kernel a line.

In a process of its own, as the tests beside it use the interpreter: `python -m tests.engine.compile_kernels 90`.
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_kernels
from engine.attention.paged_triton import EXACT, LAUNCH, stages
from engine.sampler_triton import BLOCK, draw_kernel

BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "i64"
TYPES = {
    **dict.fromkeys(("query", "key", "value", "out", "data"), BF16),
    **dict.fromkeys(("partial", "sums", "drawn"), FP32),
    **dict.fromkeys(("table", "positions", "parts", "slots", "tiles", "num_tiles"), INT32),
    **dict.fromkeys(
        ("layer_at", "block_stride", "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "out_token"), INT64
    ),
    "logits": BF16,
    "asked": "*fp64",
    **dict.fromkeys(("row_stride",), INT64),
    **dict.fromkeys(("window", "mine", "draws", "vocabulary"), "i32"),
    "scaling": "fp32",
}
SHAPE = {"HEADS": 8, "HEADS_PAD": 8, "GROUP": 4, "GROUP_PAD": 4, "DIM": 128, "DIM_PAD": 128, "BLOCK": 32, "CHUNK": 256}


def compiled(kernel: triton.JITFunction, capability: int, **constants: int) -> dict[str, object]:
    """Pointers and strides are multiples of 16, as they are at a launch."""
    names = kernel.arg_names
    fixed = {name: value for name, value in (SHAPE | constants).items() if name in names}
    fixed |= {"COLUMNS": 6, "WIDEN": False} if "WIDEN" in names else {}
    signature = {name: "constexpr" if name in fixed else TYPES[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith(("*", "i64"))}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
    options = {"num_warps": LAUNCH["num_warps"], "num_stages": stages(2 * SHAPE["DIM"], 227 * 1024), **EXACT}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "rows": constants.get("M"),
        "cubin_bytes": len(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
        "products": ptx.count("mma"),
        "copies_ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
    }


if __name__ == "__main__":
    for rows in (16, 64):
        print(json.dumps(compiled(triton_kernels.attend, int(sys.argv[1]), M=rows, N=LAUNCH["N"])))
    for kernel, constants in (
        (triton_kernels.store, {}),
        (triton_kernels.merge, {}),
        (draw_kernel, {"N": BLOCK, "CUT": False}),
        (draw_kernel, {"N": BLOCK, "CUT": True}),
    ):
        print(json.dumps(compiled(kernel, int(sys.argv[1]), **constants)))
