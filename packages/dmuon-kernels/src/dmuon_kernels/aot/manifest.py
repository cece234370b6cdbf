"""What ships: ``cubins/manifest.json`` and, beside it, one archive of cubins for every architecture.

An archive is the cubins one after another, compressed as a whole, since they have most of their code in common.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuon_kernels.aot.variant import Variant

FORMAT = 1
TRITON = "3.6.0"
"""The compiler's version. Newer ones emit code that drivers of CUDA 13.0 and older refuse."""

SOURCES = ("tma_kernel.py", "triton_kernel.py")
"""The modules whose kernels are compiled; cubins of other versions of them are not used."""

ARCHITECTURE_OF = {(8, 0): 80, (8, 6): 86, (8, 9): 86, (9, 0): 90}
"""Compute capability of a device to the one whose cubins it runs."""

THREADS_PER_WARP = 32

_FOLDER = Path(__file__).parent / "cubins"
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class TensorMap:
    """How a descriptor's tensor map is encoded; its element strides are 1, it is not interleaved, beyond are zeros.

    Attributes:
        box: entries per dimension that one copy moves, outermost first.
        swizzle: CUtensorMapSwizzle.
        element_type: CUtensorMapDataType.
        element_bytes: bytes per entry.
    """

    box: tuple[int, ...]
    swizzle: int
    element_type: int
    element_bytes: int


@dataclass(frozen=True)
class Artefact:
    """A compiled kernel.

    Attributes:
        variant: its name.
        parameters: name to Triton type, in order.
        tensor_maps: by parameter.
        shared: bytes of dynamic shared memory per program.
        registers: per thread.
        stack: bytes per thread.
        sha256: of the cubin.
        offset: of the cubin in its decompressed archive.
        size: of the cubin in bytes.
    """

    variant: Variant
    parameters: dict[str, str]
    tensor_maps: dict[str, TensorMap]
    shared: int
    registers: int
    stack: int
    sha256: str
    offset: int
    size: int


@dataclass(frozen=True)
class Manifest:
    """Everything that ships.

    Attributes:
        triton: the compiler's version.
        sources: file name to SHA-256 of what was compiled.
        artefacts: by architecture and variant.
    """

    triton: str
    sources: dict[str, str]
    artefacts: dict[int, dict[Variant, Artefact]]


def archive_name(architecture: int) -> str:
    return f"sm_{architecture}.xz"


@functools.cache
def read_manifest() -> Manifest | None:
    """The manifest of this installation; None where there is none.

    Raises:
        ValueError: it is not one that this version reads.
    """
    file = _FOLDER / "manifest.json"
    return parse(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


@functools.cache
def source_hashes() -> dict[str, str]:
    """SHA-256 of the kernels' sources as installed."""
    return {name: hashlib.sha256((_PACKAGE / name).read_bytes()).hexdigest() for name in SOURCES}


@functools.lru_cache(maxsize=1)
def _archive(architecture: int) -> bytes:
    # Some builds of Python have none; the other ways to a kernel must not miss it.
    import lzma

    return lzma.decompress((_FOLDER / archive_name(architecture)).read_bytes())


def read_cubin(architecture: int, artefact: Artefact) -> bytes:
    """The cubin.

    Raises:
        OSError, lzma.LZMAError: the archive cannot be read.
        ValueError: its bytes are not the ones that were built.
    """
    cubin = _archive(architecture)[artefact.offset : artefact.offset + artefact.size]
    if hashlib.sha256(cubin).hexdigest() != artefact.sha256:
        raise ValueError(f"{archive_name(architecture)} is damaged: install dmuon-kernels again")
    return cubin


def dump(manifest: Manifest) -> str:
    """JSON text: a line for every artefact, so that two versions compare well."""
    tables: list[Any] = []
    rows = {
        str(architecture): [_row(artefact, tables) for artefact in artefacts.values()]
        for architecture, artefacts in manifest.artefacts.items()
    }
    head = {"format": FORMAT, "triton": manifest.triton, "sources": manifest.sources}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines += ['"signatures": [', ",\n".join(map(json.dumps, tables)), "],", '"artefacts": {']
    blocks = [f'"{name}": [\n' + ",\n".join(map(json.dumps, each)) + "\n]" for name, each in rows.items()]
    return "{\n" + "\n".join(lines) + "\n" + ",\n".join(blocks) + "\n}\n}\n"


def _row(artefact: Artefact, signatures: list[Any]) -> dict[str, Any]:
    """One artefact; its parameters by their place in ``signatures``, which grows."""
    variant = artefact.variant
    signature = {
        "parameters": artefact.parameters,
        "tensor_maps": {name: vars(each) | {"box": list(each.box)} for name, each in artefact.tensor_maps.items()},
    }
    if signature not in signatures:
        signatures.append(signature)
    return {
        "kernel": variant.kernel,
        "dtype": variant.dtype,
        "warps": variant.warps,
        "constants": {name: int(value) for name, value in sorted(variant.constants)},
        "folded": sorted(variant.folded),
        "signature": signatures.index(signature),
        "shared": artefact.shared,
        "registers": artefact.registers,
        "stack": artefact.stack,
        "sha256": artefact.sha256,
        "offset": artefact.offset,
        "size": artefact.size,
    }


def parse(document: Mapping[str, Any]) -> Manifest:
    """The manifest that :func:`dump` wrote.

    Raises:
        ValueError: it is of another format, or damaged.
    """
    try:
        if document["format"] != FORMAT:
            raise ValueError(f"the manifest has format {document['format']!r}, this version reads {FORMAT}")
        signatures = [_signature(each) for each in document["signatures"]]
        artefacts = {
            int(architecture): {each.variant: each for each in (_artefact(row, signatures) for row in rows)}
            for architecture, rows in document["artefacts"].items()
        }
        return Manifest(document["triton"], dict(document["sources"]), artefacts)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"the manifest is damaged: install dmuon-kernels again ({error!r})") from error


_Signature = tuple[dict[str, str], dict[str, TensorMap]]


def _signature(entry: Mapping[str, Any]) -> _Signature:
    maps = {name: TensorMap(**{**each, "box": tuple(each["box"])}) for name, each in entry["tensor_maps"].items()}
    return dict(entry["parameters"]), maps


def _artefact(row: Mapping[str, Any], signatures: list[_Signature]) -> Artefact:
    constants, folded = frozenset(row["constants"].items()), frozenset(row["folded"])
    return Artefact(
        Variant(row["kernel"], row["dtype"], row["warps"], constants, folded),
        *signatures[row["signature"]],
        *(row[name] for name in ("shared", "registers", "stack", "sha256", "offset", "size")),
    )
