"""Compiles the Triton kernels for GPUs that need not be there, with Triton's own assembler, as they would be launched on each.

`in_a_process` does so in a process of its own, since the tests beside it run kernels in the interpreter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rollout.engine.cuda.launches import KNOWN, Launch, choose, over_blocks, power_of_two, with_codes

BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "i64"
FP8_TYPES = {"data": "*u8", "halves": "*i16", "words": INT32}
"""of the pool in fp8"""
TYPES = {
    **dict.fromkeys(
        (
            "query",
            "key",
            "value",
            "out",
            "data",
            "halves",
            "words",
            "logits",
            "x",
            "residual",
            "weight",
            "bias",
            "qkv",
            "cos",
            "sin",
            "both",
        ),
        BF16,
    ),
    **dict.fromkeys(("partial", "sums", "drawn"), FP32),
    "sinks": BF16,
    **dict.fromkeys(("table", "positions", "parts", "slots", "tiles", "num_tiles"), INT32),
    **dict.fromkeys(
        ("layer_at", "block_stride", "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "out_token", "row_stride"),
        INT64,
    ),
    **dict.fromkeys(("x_row", "weight_row"), INT64),
    **dict.fromkeys(("q_weight", "k_weight"), BF16),
    **dict.fromkeys(("window", "mine", "draws", "vocabulary", "rows", "outs", "size", "inner", "best"), "i32"),
    **dict.fromkeys(("eps", "q_eps", "k_eps"), "fp32"),
    "asked": "*fp64",
    **dict.fromkeys(("data_words", "secret", "block_sums", "pieces", "states"), "*i64"),
    "blocks": "i32",
    **dict.fromkeys(("scaling", "before"), "fp32"),
}
"""of the kernels' arguments, in bf16"""


class Heads(NamedTuple):
    """Of a model's attention."""

    dim: int = 128
    group: int = 4
    kv_heads: int = 8
    itemsize: int = 2
    fp8: bool = False
    """KV is kept so"""
    value_dim: int = 0
    """0: as wide as keys"""
    block: int = 64
    """tokens of a block: CUDA's default"""
    cap: bool = False
    sinks: bool = False


PRODUCTION = Heads()
"""Qwen3-8B's"""
FP8 = PRODUCTION._replace(fp8=True)
SHORT = PRODUCTION, FP8
SHAPES = (
    *SHORT, *(each._replace(block=32) for each in SHORT), Heads(dim=64, group=8, block=32),
    Heads(dim=64, group=7, kv_heads=2), Heads(dim=256, group=2, kv_heads=4), Heads(itemsize=4),
    Heads(dim=64, group=3, kv_heads=3, fp8=True), Heads(dim=256, group=2, kv_heads=4, fp8=True),
    Heads(dim=512, group=8, kv_heads=1),
    Heads(dim=64, group=8, sinks=True), Heads(dim=256, group=2, kv_heads=4, cap=True),
    Heads(dim=128, group=2, kv_heads=16, cap=True),
    Heads(dim=192, value_dim=128, group=1, kv_heads=16), Heads(dim=192, value_dim=128, group=16, kv_heads=4, sinks=True),
)  # fmt: skip
"""the last five: gpt-oss, Gemma 2 of 9B and 27B, Moonlight, MiMo-V2-Flash"""


def compiled(
    kernel: Any,
    capability: int,
    constants: dict[str, Any],
    options: dict[str, Any],
    wide: bool = False,
    other: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Compile one kernel and return its figures. `wide`: numbers in fp32, not bf16; with a constant FP8 the pool is in fp8.
    other: types of arguments that are not those of `TYPES`. Pointers, strides and sizes of rows are multiples of 16, as they
    are at a launch, but those that the kernel does not specialize."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    fixed = {name: value for name, value in constants.items() if name in names}
    types = {name: FP32 if wide and kind == BF16 else kind for name, kind in TYPES.items()}
    types |= (FP8_TYPES if fixed.get("FP8") else {}) | dict(other)
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    even = [
        not (each.do_not_specialize or each.do_not_specialize_on_alignment)
        and (signature[each.name].startswith(("*", "i64")) or each.name in ("size", "outs", "inner"))
        for each in kernel.params
    ]
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names)) if even[i]}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx, tools = made.asm["ptx"], Path(triton.__file__).parent / "backends/nvidia/bin"
    registers, stack = usage(made.asm["cubin"], tools / "cuobjdump")
    return {
        "capability": capability,
        "kernel": kernel.__name__,
        "shared_bytes": made.metadata.shared,
        "registers": registers,
        "spill_bytes": stack,
        "products": len(re.findall(r"\bw?g?mma|tcgen05\.mma", ptx)),
        "copies_ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
        "turn_instructions": turn_instructions(disassembled(made.asm["cubin"], tools / "nvdisasm")),
        "sum_layouts": sum_layouts(made.asm["ttgir"]),
        "product_layouts": product_layouts(made.asm["ttgir"]),
    }


def sum_layouts(ttgir: str) -> list[str]:
    """Return the shape and the layout over threads of each tensor that is summed along a dimension: they decide the order."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce".*?\}\)\s*:\s*\(tensor<([^>]*?), (#\w+)', ttgir, re.DOTALL)
    return [f"{shape} {named.get(layout, layout)}" for shape, layout in found]


def product_layouts(ttgir: str) -> list[str]:
    """Return the operation, the shapes and the layouts over threads of each product of matrices: they decide the order of its
    sums."""
    named = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    found = re.findall(r"(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b[^\n]*? : ([^\n]*?)(?: loc\([^\n]*)?\n", ttgir)
    return [f"{name} {re.sub(r'#[a-z_0-9]+', lambda each: named.get(each[0], each[0]), types)}" for name, types in found]


def disassembled(cubin: bytes, nvdisasm: Path) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout


PRODUCT = re.compile(r"\b[A-Z]+MMA\b")
"""HMMA, HGMMA, UTCHMMA …; HFMA2.MMA moves a constant"""


def turn_instructions(assembly: str) -> int:
    """Return the instructions of a warp in a turn of the innermost loop with products, on its shortest way, without the
    end of a chunk. 0: no loop has products."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in assembly.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    jumps = {i: labels[to[1]] for i, each in enumerate(code) if (to := re.search(r"\bBRA\b.*`\((\.L_\w+)\)", each))}
    loops = [(to, i) for i, to in jumps.items() if to < i and any(PRODUCT.search(each) for each in code[to:i])]
    if not loops:
        return 0
    first, end = min(loops, key=lambda loop: loop[1] - loop[0])
    least = {first: 0}
    for i in range(first, end):
        if i in least:
            always = i in jumps and not code[i].startswith("@") and not re.search(r"BRA\s+!?U?P\d", code[i])
            for to in ([] if always else [i + 1]) + ([jumps[i]] if first < jumps.get(i, 0) <= end else []):
                least[to] = min(least.get(to, least[i] + 1), least[i] + 1)
    return least[end] + 1


def usage(cubin: bytes, cuobjdump: Path) -> tuple[int, int]:
    """Return the registers, and the bytes of stack, of a thread: what does not fit into registers lies on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def attention(capability: int, heads: Heads) -> Iterator[dict[str, Any]]:
    """Yield the figures of `attend` for both kinds of tiles, as the device would launch it."""
    from rollout.engine.cuda import attention_kernels as triton_kernels
    from rollout.engine.cuda.attention import CONVERTS_FP8, EXACT

    widest = max(heads.dim, heads.value_dim)
    launches = choose(heads.group, widest, heads.itemsize, KNOWN[capability])
    launches = with_codes(launches, widest) if heads.fp8 else launches
    launches = over_blocks(launches, heads.block, widest, capability)
    for tile, launch in launches._asdict().items():
        made = compiled(
            triton_kernels.attend,
            capability,
            constants(heads, launch) | {"NATIVE": capability >= CONVERTS_FP8},
            {"num_warps": launch.warps, "num_stages": launch.stages, **EXACT},
            wide=heads.itemsize == 4,
        )
        estimate = {"shared_estimate": launch.shared_bytes, "programs": launch.programs}
        yield {**made, "tile": tile, **heads._asdict(), **launch._asdict(), **estimate, "shared_bytes": made["shared_bytes"]}


def constants(heads: Heads, launch: Launch) -> dict[str, Any]:
    width, value = power_of_two(max(heads.dim, 16)), heads.value_dim or heads.dim
    return {
        "HEADS": heads.kv_heads, "HEADS_PAD": power_of_two(heads.kv_heads), "GROUP": heads.group,
        "GROUP_PAD": power_of_two(heads.group), "DIM": heads.dim, "DIM_PAD": width, "BLOCK": heads.block, "CHUNK": 256,
        "SPAN": 8, "M": launch.rows, "N": launch.keys, "COLUMNS": 6, "WIDEN": False,
        "FP8": heads.fp8, "VALUE": value, "VALUE_PAD": power_of_two(max(value, 16)), "CAP": heads.cap, "SINKS": heads.sinks,
    }  # fmt: skip


def others(capability: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of the kernels beside `attend`."""
    from rollout.engine.cuda import attention_kernels as triton_kernels
    from rollout.engine.cuda import digest_kernels, exact_kernels, fused_kernels
    from rollout.engine.cuda.attention import EXACT
    from rollout.engine.cuda.digests import BLOCKS, UNROLL
    from rollout.engine.cuda.exact import FUSED, TILES
    from rollout.engine.cuda.library_products import BY_ROWS
    from rollout.engine.cuda.reduce import WIDTH
    from rollout.engine.cuda.sampling import BLOCK, LARGE_BLOCK, WARPS
    from rollout.engine.cuda.sampling_kernels import draw_kernel
    from rollout.engine.forward.summed import SLICES
    from rollout.engine.values.sampling import TRUNCATIONS

    launch = choose(PRODUCTION.group, PRODUCTION.dim, PRODUCTION.itemsize, KNOWN[capability]).small
    sums = [(itemsize, tile, slices) for itemsize, tile in TILES.items() for slices in (1, 2, SLICES)]
    for itemsize, tile, slices in (*sums, *((2, each, 1) for each in BY_ROWS)):
        fixed = {"M": tile.rows, "N": tile.outs, "K": tile.inputs, "BIAS": slices == 1, "WIDEN": False, "SLICES": slices}
        options = {"num_warps": tile.warps, "num_stages": tile.stages, **FUSED}
        other = {} if slices == 1 else {"out": FP32}
        made = compiled(exact_kernels.product, capability, fixed, options, itemsize == 4, other)
        yield made | {"itemsize": itemsize, "slices": slices, "numbers": tile.rows * tile.outs}
    for parts in (2, 4, SLICES):
        fixed = {"PARTS": parts, "BIAS": True, "WIDTH": WIDTH}
        yield compiled(exact_kernels.add_up, capability, fixed, {"enable_fp_fusion": False}, other={"parts": FP32}) | {
            "parts": parts
        }
    fixed = {"WIDTH": 4096, "ADD": True, "Q_HEADS": 32, "HALF_PAD": 64, "NORM": True}
    for heads in (*SHORT, PRODUCTION._replace(block=32)):
        made = compiled(fused_kernels.rope_store, capability, constants(heads, launch) | fixed | {"HEADS_PAD": 32}, EXACT)
        yield made | {"fp8": heads.fp8}
    for add, warps in ((True, 8), (False, 8), (False, 4)):
        options = {"num_warps": warps, **EXACT}
        yield compiled(fused_kernels.add_norm, capability, fixed | {"ADD": add}, options) | {"warps": warps}
    yield compiled(fused_kernels.silu_mul, capability, {"WIDTH": 1024}, EXACT)
    for kernel, heads in ((triton_kernels.store, PRODUCTION), (triton_kernels.store, FP8), (triton_kernels.merge, PRODUCTION)):
        yield compiled(kernel, capability, constants(heads, launch), EXACT) | {"fp8": heads.fp8}
    yield compiled(digest_kernels.sum_blocks, capability, {"BLOCKS": BLOCKS}, {})
    yield compiled(digest_kernels.chain, capability, {"UNROLL": UNROLL}, {"num_warps": 1})
    for cut, top in ((False, False), (True, False), (True, True)):
        fixed = {"N": LARGE_BLOCK if cut else BLOCK, "CUT": len(TRUNCATIONS) if cut else 0, "TOP": top}
        made = compiled(draw_kernel, capability, fixed, {"num_warps": WARPS, **EXACT})
        yield made | {"cut": cut, "top": top}


MIXER_TYPES = {
    **dict.fromkeys(("a", "skip", "dt_bias", "states", "g"), FP32), "rows": "*i64",
    **dict.fromkeys(("key", "value", "beta", "dt", "b", "c"), BF16),
    **dict.fromkeys(
        ("row_stride", "slot", "x_token", "x_head", "channels", "q_token", "q_head", "v_token", "v_head", "beta_token",
         "beta_head", "g_token", "g_head", "dt_token", "dt_head", "b_token", "b_group", "c_token", "c_group"), INT64),
    **dict.fromkeys(("scale", "dt_least", "dt_most"), "fp32"),
}  # fmt: skip
"""of the arguments of recurrent mixers"""
STATES = {"qwen3.5": (128, 128), "olmo_hybrid": (96, 192), "kimi_linear": (128, 128), "widest": (512, 64)}
"""keys and columns of a head of a delta rule"""
MAMBAS = {"nemotron_h": (64, 128), "falcon_h1": (64, 256), "widest": (64, 512)}
"""channels and numbers of a head of Mamba-2"""


def mixers(capability: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of the recurrent mixers, in bf16 and, the two of a delta rule and of Mamba-2 that differ most, fp32."""
    from rollout.engine.cuda import recurrence_kernels
    from rollout.engine.cuda.recurrence import CHANNELS, PLAIN, TOKENS, tile_of

    def made(kernel: Any, name: str, warps: int, wide: bool, **fixed: Any) -> dict[str, Any]:
        other = {key: FP32 if wide and kind == BF16 else kind for key, kind in MIXER_TYPES.items()}
        other |= {"states": BF16} if kernel is recurrence_kernels.convolve and not wide else {}
        figures = compiled(kernel, capability, fixed, {"num_warps": warps, **PLAIN}, wide, other)
        return figures | {"of": name, "itemsize": 4 if wide else 2}

    for wide in (False, True):
        window = {"TAPS": 4, "KEPT_PAD": 4, "BIAS": True, "SILU": True, "TOKENS": TOKENS, "WIDTH": CHANNELS}
        yield made(recurrence_kernels.convolve, "any", 4, wide, **window)
        for name, (keys, columns) in STATES.items():
            padded, width = tile_of(keys, columns)
            yield made(
                recurrence_kernels.delta_rule, name, 1, wide, HEADS=32, REPEAT=2, KEYS=keys, KEYS_PAD=padded, COLUMNS=columns,
                WIDTH=width, BY_CHANNEL=name == "kimi_linear", NORMALIZED=True,
            )  # fmt: skip
        for name, (channels, numbers) in MAMBAS.items():
            padded, width = tile_of(numbers, channels)
            yield made(
                recurrence_kernels.mamba2, name, 1, wide, HEADS=32, REPEAT=4, CHANNELS=channels, WIDTH=width, NUMBERS=numbers,
                NUMBERS_PAD=padded, SKIP=True, DT_BIAS=True, SOFTPLUS=True,
            )  # fmt: skip


EXPERT_TYPES = {
    **dict.fromkeys(("counts", "order", "place", "tile_expert", "tile_begin", "tile_end", "totals"), INT32), "chosen": "*i64",
    "weights": FP32, **dict.fromkeys(("w_expert", "w_out", "w_in", "x_row"), INT64),
    **dict.fromkeys(("choices", "width"), "i32"),
}  # fmt: skip
"""of the arguments of products of experts"""


def experts(capability: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of the kernels of experts: both layouts of a matrix, both dtypes."""
    from rollout.engine.cuda import experts_kernels
    from rollout.engine.cuda.exact import FUSED, TILES
    from rollout.engine.cuda.experts import CHOICES_AT_ONCE, PLAIN, WIDTH
    from rollout.engine.forward.summed import SLICES

    sizes = {"EXPERTS": 128, "EXPERTS_PAD": 128, "M": TILES[2].rows, "N": CHOICES_AT_ONCE}
    for kernel in (experts_kernels.count, experts_kernels.sort):
        yield compiled(kernel, capability, sizes, {}, other=EXPERT_TYPES)
    yield compiled(
        experts_kernels.combine, capability, {"CHOICES": 8, "CHOICES_PAD": 8, "WIDTH": WIDTH}, PLAIN, other=EXPERT_TYPES
    )
    for itemsize, tile in TILES.items():
        for near in ("w_in", "w_out"):  # numbers of a matrix that lie side by side: a launch makes a stride of 1 a constant
            for slices in (1, SLICES):
                fixed = {"M": tile.rows, "N": tile.outs, "K": tile.inputs, "WIDEN": False, "SLICES": slices, near: 1}
                fixed |= {"CHOICES": 8 if slices == 1 else 0, "BIAS": slices == 1}
                options = {"num_warps": tile.warps, "num_stages": tile.stages, **FUSED}
                other = EXPERT_TYPES | ({} if slices == 1 else {"out": FP32})
                made = compiled(experts_kernels.grouped, capability, fixed, options, itemsize == 4, other)
                yield made | {"itemsize": itemsize, "near": near, "slices": slices, "numbers": tile.rows * tile.outs}


def rows(capability: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of all kernels, those of attention for all shapes of heads."""
    for heads in SHAPES:
        yield from attention(capability, heads)
    yield from others(capability)
    yield from mixers(capability)
    yield from experts(capability)


def in_a_process(capability: int, timeout_s: float) -> list[dict[str, Any]]:
    """Have `rows` made by a process without the interpreter. Raises RuntimeError with what that printed where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", f"import {__name__} as c; c.main()", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"kernels for compute capability {capability / 10} do not compile:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Print the rows of one architecture, `sys.argv[1]`."""
    for row in rows(int(sys.argv[1])):
        print(json.dumps(row), flush=True)
