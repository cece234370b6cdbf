"""Compile the Triton kernels for GPUs that are not there, and print what each variant takes, as JSON.

Run by ``test_compile.py`` in a process of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from dmuon_kernels.normalize import _TILES, PARTS
from dmuon_kernels.normalize_kernel import scale_kernel, squares_kernel
from dmuon_kernels.tma_kernel import syrk_tma_kernel
from dmuon_kernels.triton_config import CONFIGS, TmaConfig, TritonConfig, parse_config
from dmuon_kernels.triton_kernel import syrk_kernel
from dmuon_kernels.update_kernel import apply_kernel, direction_kernel, momentum_kernel

TINY, SMALL, LARGE, UNALIGNED = CONFIGS.values()
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Variant:
    """One specialisation: sizes and strides are multiples of 8 where ``aligned``, and of 16 where ``divisible``."""

    dtype: str
    k_major: bool
    with_c: bool
    device_scalars: bool
    aligned: bool
    divisible: bool
    config: TritonConfig


FAST = (
    Variant("fp16", k_major=True, with_c=False, device_scalars=False, aligned=True, divisible=True, config=LARGE),
    Variant("bf16", k_major=False, with_c=True, device_scalars=True, aligned=True, divisible=True, config=LARGE),
)
ANY = (
    Variant("fp16", k_major=True, with_c=True, device_scalars=False, aligned=True, divisible=False, config=LARGE),
    Variant("bf16", k_major=True, with_c=False, device_scalars=False, aligned=False, divisible=False, config=UNALIGNED),
    Variant("fp16", k_major=False, with_c=True, device_scalars=True, aligned=False, divisible=False, config=UNALIGNED),
)
REST = (
    Variant("bf16", k_major=False, with_c=True, device_scalars=False, aligned=True, divisible=False, config=LARGE),
    Variant("fp16", k_major=True, with_c=True, device_scalars=False, aligned=True, divisible=True, config=SMALL),
    Variant("bf16", k_major=False, with_c=False, device_scalars=True, aligned=False, divisible=False, config=TINY),
)
BUILDS = {80: FAST + ANY + REST, 86: FAST, 90: FAST + ANY}
"""Variants by compute capability. Few, since each takes a second."""


def source_of(variant: Variant) -> triton.compiler.ASTSource:
    pointer, scalar = f"*{variant.dtype}", "*fp32" if variant.device_scalars else "fp32"
    constants = {
        "HAS_C": variant.with_c,
        "ALPHA_ON_DEVICE": variant.device_scalars,
        "BETA_ON_DEVICE": variant.device_scalars,
        "ALIGNED": variant.aligned,
        "EVEN_K": variant.divisible,
        "TILE_M": variant.config.tile_m,
        "TILE_K": variant.config.tile_k,
        "STAGES": variant.config.stages,
        "TILE_STEP": 1,
        "EMULATE": False,
        **dict.fromkeys(("a_sk", "b_sk") if variant.k_major else ("a_sm", "b_sm"), 1),
        **dict.fromkeys(("c_sn", "d_sn"), 1),
    }
    types = {"a": pointer, "b": pointer, "c": pointer, "d": pointer, "alpha": scalar, "beta": scalar}
    names = syrk_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    pointers = {name for name in names if signature[name].startswith("*")}
    integers = {name for name in names if signature[name] == "i32" and name != "tiles"}
    multiples_of_16 = pointers | integers if variant.divisible else pointers
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in multiples_of_16}
    return triton.compiler.ASTSource(syrk_kernel, signature, constants, attributes)


@dataclass(frozen=True)
class TmaVariant:
    """One specialisation of the kernel with tensor descriptors. ``general``: all operands, M-major, device scalars."""

    dtype: str
    general: bool
    config: TmaConfig

    aligned = True


TMA_BUILDS = [
    TmaVariant(dtype, general, parse_config(label))
    for dtype, general, label in (
        ("fp16", False, "tma-64x64x128-w4-s3-u64-g4-k1"),
        ("bf16", True, "tma-64x64x64-w4-s4-u64-g4-k3"),
        ("fp16", True, "tma-64x128x128-w4-s3-u64-g8-k1"),
        ("fp16", False, "tma-64x128x64-w4-s4-u64-g8-k1-p"),
        ("bf16", False, "tma-128x128x64-w4-s3-u128-g8-k1"),
        ("fp16", True, "tma-128x128x64-w4-s3-u128-g8-k1"),
        ("fp16", False, "tma-128x128x64-w4-s3-u32-g8-k4t"),
        ("fp16", True, "tma-128x128x64-w4-s3-u32-g8-k4t"),
        ("bf16", True, "tma-128x128x64-w4-s5-u64-g8-k1"),
        ("fp16", True, "tma-128x256x64-w8-s3-u64-g4-k1"),
    )
]


def tma_source_of(variant: TmaVariant) -> triton.compiler.ASTSource:
    config, general = variant.config, variant.general
    tile_m, tile_n, tile_k, chunk = config.tile_m, config.tile_n, config.tile_k, config.chunk

    def block(rows: int, columns: int) -> str:
        return f"tensordesc<{variant.dtype}{[1, rows, columns]}>"

    constants = {
        "HAS_C": general,
        "ALPHA_ON_DEVICE": general,
        "BETA_ON_DEVICE": general,
        "A_K_MAJOR": not general,
        "B_K_MAJOR": not general,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "CHUNK": chunk,
        "GROUP": config.group,
        "STAGES": config.stages,
        "SPLIT": config.split,
        "SOME_WHOLE": config.split == 1 or config.tail,
        "UNIT_STEP": 1,
        "EMULATE": False,
        **({} if general else {"c_desc": None}),
        **({} if general or tile_m != tile_n else {"b_desc": None}),
        **({} if config.split > 1 else {"partials": None, "arrivals": None}),
    }
    scalar = "*fp32" if general else "fp32"
    types = {
        "a_desc": block(tile_k, tile_m) if general else block(tile_m, tile_k),
        "b_desc": block(tile_k, tile_n) if general else block(tile_n, tile_k),
        "c_desc": block(tile_m, chunk),
        "d_desc": block(tile_m, chunk),
        "mirror_desc": block(chunk, tile_m),
        "d": f"*{variant.dtype}",
        "partials": "*fp32",
        "arrivals": "*i32",
        "alpha": scalar,
        "beta": scalar,
    }
    names = syrk_tma_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    multiples_of_16 = {name for name in names if signature[name].startswith("*")} | {"d_sb", "d_sm"}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in multiples_of_16}
    return triton.compiler.ASTSource(syrk_tma_kernel, signature, constants, attributes)


NORMALIZE_BUILDS = [
    (dtype, tile, by_column) for dtype in ("bf16", "fp32") for tile in _TILES for by_column in (False, True)
]
"""Dtype of the input, rows and columns of a tile, and whether the input lies across the output."""


def measure_normalizing(dtype: str, tile: tuple[int, int], by_column: bool, capability: int) -> list[dict[str, object]]:
    """Both passes, for matrices whose sizes and strides are multiples of 16."""
    types = {"x": f"*{dtype}", "out": "*fp16", "sums": "*fp32", "exponents": "*i32"}
    constants = {"ROWS": tile[0], "COLUMNS": tile[1], "PARTS": PARTS, "x_sr" if by_column else "x_sc": 1}
    return [compiled_pass(kernel, constants, types, capability) for kernel in (squares_kernel, scale_kernel)]


UPDATE_BUILDS = [(dtype, tile) for dtype in ("bf16", "fp32") for tile in _TILES]
"""Dtype of the gradient and of the copy, and a tile."""


def measure_updating(dtype: str, tile: tuple[int, int], capability: int) -> list[dict[str, object]]:
    """The three passes, for addresses, sizes and strides that are multiples of 16."""
    other = tl.bfloat16 if dtype == "bf16" else tl.float32
    constants = {
        "GRAD": other,
        "BUFFER": tl.float32,
        "PRESENCE": tl.float32,
        "NESTEROV": True,
        "WEIGHT": tl.float32,
        "COPY": other,
        "READS_LR": True,
        "ALIGNED": True,
        "ROWS": tile[0],
        "COLUMNS": tile[1],
        "PARTS": PARTS,
        **dict.fromkeys(("g_sc", "b_sc", "w_sc", "f_sc", "c_sc"), 1),
    }
    types = {"table": "*i64", "sums": "*fp32", "exponents": "*i32", "lr": "*fp32", "out": "*fp16", "factor": "*fp16"}
    types |= dict.fromkeys(("momentum", "rest", "rate", "weight_decay", "scale"), "fp32")
    return [
        compiled_pass(kernel, constants, types, capability)
        for kernel in (momentum_kernel, direction_kernel, apply_kernel)
    ]


def compiled_pass(kernel: object, constants: dict, types: dict[str, str], capability: int) -> dict[str, object]:
    """Resources and wide loads of a kernel whose integers and pointers are multiples of 16, but counts of programs."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    loose = {*constants, "parts", "programs", *(name for name, kind in types.items() if kind == "fp32")}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in loose}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    vectors = len(re.findall(r"ld\.global\.(?:\w+\.)*v4", compiled.asm["ptx"]))
    return {"resources": resources(compiled.asm["cubin"]), "vectors": vectors, "capability": capability}


def measure(variant: Variant | TmaVariant, capability: int) -> dict[str, object]:
    options = {"num_warps": variant.config.warps, "enable_fp_fusion": True}
    source = source_of(variant) if isinstance(variant, Variant) else tma_source_of(variant)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "variant": {**asdict(variant), "aligned": variant.aligned},
        "capability": capability,
        "shared": kernel.metadata.shared,
        "resources": resources(kernel.asm["cubin"]),
        "bulk_copies": kernel.asm["ptx"].count("cp.async.bulk.tensor"),
        "tensor_cores": bool(re.search(r"wgmma\.mma_async|mma\.sync", kernel.asm["ptx"])),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory per thread, by cuobjdump; empty where there is none."""
    if not CUOBJDUMP.is_file():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    builds = [(variant, capability) for capability, variants in BUILDS.items() for variant in variants]
    builds += [(variant, 90) for variant in TMA_BUILDS]
    products = [measure(variant, capability) for variant, capability in builds]
    passes = [found for build in NORMALIZE_BUILDS for found in measure_normalizing(*build, 90)]
    passes += measure_normalizing("fp32", _TILES[0], False, 80)
    passes += [found for build in UPDATE_BUILDS for found in measure_updating(*build, 90)]
    passes += measure_updating("bf16", _TILES[0], 80)
    json.dump({"products": products, "passes": passes}, sys.stdout)
