"""Compile the kernels that ship with dmuon-kernels: needs Triton 3.6.0, no GPU and no CUDA toolkit.

    python tools/build_cubins.py [--jobs N]

Writes ``packages/dmuon-kernels/src/dmuon_kernels/aot/cubins``. A second run writes the same bytes. It stops at a kernel
that a driver of CUDA 12.8 would refuse, that spills, or that takes more shared memory than the architecture has.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import lzma
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Line numbers would bring this machine's paths into the cubins.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import triton
from triton.backends.compiler import GPUTarget

from dmuon_kernels.aot.layout import Layout
from dmuon_kernels.aot.manifest import TRITON, Artefact, Manifest, TensorMap, archive_name, dump, source_hashes
from dmuon_kernels.aot.table import ARCHITECTURES, tabled_launches
from dmuon_kernels.aot.variant import Variant, divisors_of, signature_of
from dmuon_kernels.triton_jit import KERNELS
from dmuon_kernels.triton_launch import Launch

TARGET = Path(__file__).parents[1] / "packages/dmuon-kernels/src/dmuon_kernels/aot/cubins"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block can have."""
LAST_PTX = (8, 8)
ELF_ABI = 7
"""What drivers of CUDA 12.8 to 13.0 take; the next ABI came with PTX 9.4."""

# Triton's numbers for element types, and the driver's (CUtensorMapDataType).
_ELEMENT_TYPES = {"fp16": 6, "bf16": 9}
_PARAMETER_BYTES = {"u32": 4, "f32": 4, "u64": 8}


class Unfit(AssertionError):
    """A compiled kernel that must not ship."""


@dataclass(frozen=True)
class Built:
    """What the compiler made of a variant."""

    variant: Variant
    signature: dict[str, str]
    cubin: bytes
    ptx: str
    facts: dict[str, Any]


def compile_variant(variant: Variant, launch: Launch, architecture: int) -> Built:
    """Compile the kernel that runs ``launch`` on an architecture."""
    signature = signature_of(launch, variant)
    kernel = triton.compile(
        _source_of(variant, signature),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps, "enable_fp_fusion": True},
    )
    return Built(variant, signature, kernel.asm["cubin"], kernel.asm["ptx"], kernel.metadata._asdict())


def complaint_of(built: Built, architecture: int) -> str | None:
    """Why this kernel must not ship, or None."""
    return (
        _abi_complaint(built.cubin, built.ptx)
        or _launch_complaint(built.facts, built.variant)
        or _parameter_complaint(built.ptx, built.signature)
        or _resource_complaint(_resources(built.cubin), built.facts["shared"], architecture)
    )


def artefact_of(built: Built, offset: int) -> Artefact:
    """The entry in the manifest of a cubin that begins at ``offset`` of its archive."""
    used = _resources(built.cubin)
    return Artefact(
        variant=built.variant,
        parameters=built.signature,
        tensor_maps=_tensor_maps(built.signature, built.facts["tensordesc_meta"], built.variant.dtype),
        shared=built.facts["shared"],
        registers=used["REG"],
        stack=used["STACK"],
        sha256=hashlib.sha256(built.cubin).hexdigest(),
        offset=offset,
        size=len(built.cubin),
    )


def _source_of(variant: Variant, signature: dict[str, str]) -> triton.compiler.ASTSource:
    kernel = KERNELS[variant.kernel]
    constants = {**dict.fromkeys(variant.folded, 1), **{name: _typed(name, x) for name, x in variant.constants}}
    names = kernel.arg_names
    constants |= dict.fromkeys(set(names) - signature.keys() - constants.keys())
    divisors = divisors_of(variant, signature)
    return triton.compiler.ASTSource(
        kernel,
        {name: signature.get(name, "constexpr") for name in names},
        # The order of constants counts in the compiler's cache, and sets have none.
        {name: constants[name] for name in names if name in constants},
        {(i,): [["tt.divisibility", divisors[name]]] for i, name in enumerate(names) if name in divisors},
    )


_FLAGS = ("HAS_C", "ALPHA_ON_DEVICE", "BETA_ON_DEVICE", "A_K_MAJOR", "B_K_MAJOR", "ALIGNED", "EVEN_K", "SOME_WHOLE")


def _typed(name: str, value: int) -> int:
    return bool(value) if name in (*_FLAGS, "EMULATE") else value


def _abi_complaint(cubin: bytes, ptx: str) -> str | None:
    version = re.search(r"^\.version (\d+)\.(\d+)", ptx, flags=re.MULTILINE)
    if version is None or (int(version[1]), int(version[2])) > LAST_PTX:
        return f"{version and version[0]} is newer than PTX {LAST_PTX}"
    # Byte 8 of an ELF file is its ABI's version.
    return None if cubin[8] == ELF_ABI else f"ELF ABI {cubin[8]}, not {ELF_ABI}"


def _launch_complaint(facts: dict[str, Any], variant: Variant) -> str | None:
    wanted = {
        "name": variant.kernel,
        "num_warps": variant.warps,
        "num_ctas": 1,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
    }
    odd = {name: facts[name] for name, value in wanted.items() if facts[name] != value}
    return f"the loader does not serve {odd}" if odd else None


def _parameter_complaint(ptx: str, signature: dict[str, str]) -> str | None:
    entry = re.search(r"\.visible \.entry .*?\)", ptx, flags=re.DOTALL)
    lines = re.findall(r"\.param (.+?),?$", entry[0] if entry else "", flags=re.MULTILINE)
    found = [_bytes_of(line.rstrip(")")) for line in lines]
    expected = list(Layout.of(list(signature.values())).sizes)
    return None if found == expected else f"parameters of {found} bytes, the loader passes {expected}"


def _bytes_of(parameter: str) -> int:
    array = re.search(r"\.b8 \S+\[(\d+)\]", parameter)
    return int(array[1]) if array else _PARAMETER_BYTES[parameter.split(maxsplit=1)[0].lstrip(".")]


def _resource_complaint(used: dict[str, int], shared: int, architecture: int) -> str | None:
    if used["STACK"] or used["LOCAL"]:
        return f"it spills: {used}"
    limit = SHARED_LIMIT[architecture]
    return f"{shared} bytes of shared memory, {limit} are there" if shared > limit else None


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory per thread, by cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def _tensor_maps(signature: dict[str, str], facts: Sequence[dict], dtype: str) -> dict[str, TensorMap]:
    names = [name for name, kind in signature.items() if kind.startswith("tensordesc")]
    return {
        name: TensorMap(tuple(fact["block_size"]), fact["swizzle"], _ELEMENT_TYPES[dtype], fact["elem_size"])
        for name, fact in zip(names, facts, strict=True)
    }


def build(architecture: int, jobs: int) -> tuple[bytes, dict[Variant, Artefact]]:
    """An architecture's cubins one after another, and their entries."""
    # Neighbours that differ little compress best.
    ordered = sorted(tabled_launches(architecture).items(), key=lambda each: each[0].label)
    archive, artefacts = bytearray(), {}
    with ProcessPoolExecutor(jobs) as pool:
        for built in pool.map(functools.partial(_compile_fit, architecture), ordered):
            artefacts[built.variant] = artefact_of(built, len(archive))
            archive += built.cubin
    return bytes(archive), artefacts


def _compile_fit(architecture: int, each: tuple[Variant, Launch]) -> Built:
    built = compile_variant(*each, architecture)
    complaint = complaint_of(built, architecture)
    if complaint is not None:
        raise Unfit(f"sm_{architecture} {built.variant.label}: {complaint}")
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--target", type=Path, default=TARGET, help="the folder to write")
    arguments = parser.parse_args()
    if triton.__version__ != TRITON:
        parser.error(f"needs Triton {TRITON}, found {triton.__version__}: its cubins would be others")
    arguments.target.mkdir(parents=True, exist_ok=True)
    artefacts = {}
    for architecture in ARCHITECTURES:
        archive, artefacts[architecture] = build(architecture, arguments.jobs)
        packed = lzma.compress(archive, preset=9 | lzma.PRESET_EXTREME)
        (arguments.target / archive_name(architecture)).write_bytes(packed)
        print(f"sm_{architecture}: {len(artefacts[architecture])} kernels, {len(archive)} bytes, {len(packed)} packed")
    text = dump(Manifest(TRITON, source_hashes(), artefacts))
    (arguments.target / "manifest.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
