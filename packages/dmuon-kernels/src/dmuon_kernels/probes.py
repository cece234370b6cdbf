"""Can a backend run here? Each probe answers with None or with the reason and its remedy.

Probes look at distributions and files, never import what they look for, and ask the device for its capability only.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

Version = tuple[int, ...]

SM80, SM90 = (8, 0), (9, 0)
QUACK_RANGES: dict[str, tuple[Version, Version]] = {
    "quack-kernels": ((0, 5), (0, 7)),
    "nvidia-cutlass-dsl": ((4, 5), (5,)),
}
"""What the extra ``quack`` installs: distribution -> (first version that works, first version that is not tried)."""

_TRITON_TRUE = ("1", "true", "on")
_HALVES = (torch.float16, torch.bfloat16)


def probe_quack(device: torch.device) -> str | None:
    """SM90 and up, with quack-kernels and nvidia-cutlass-dsl in the supported ranges, and Triton for the mirroring."""
    return capability_complaint(device, SM90) or package_complaint(QUACK_RANGES, "quack") or compiler_complaint()


def probe_cute_sm80(device: torch.device) -> str | None:
    """SM80 to SM89."""
    return capability_complaint(device, SM80, below=SM90) or not_carried("cute_sm80")


def not_carried(name: str) -> str | None:
    """The backends that have a name and a probe, but no kernel in this version."""
    return f"dmuon-kernels 0.1.0 carries no {name} kernel yet; take another backend"


def capability_complaint(
    device: torch.device, at_least: tuple[int, int], *, below: tuple[int, int] | None = None
) -> str | None:
    """Why ``device`` is no NVIDIA GPU with a compute capability in [at_least, below)."""
    wanted = f"a compute capability of {_dotted(at_least)} or more" + (f", below {_dotted(below)}" if below else "")
    if device.type != "cuda":
        return f"needs an NVIDIA GPU with {wanted}, this device is {device.type}"
    if torch.version.hip is not None:
        return f"needs an NVIDIA GPU with {wanted}, this torch is built for ROCm"
    if not torch.cuda.is_available():
        return f"needs an NVIDIA GPU with {wanted}, torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < at_least or (below is not None and capability >= below):
        return f"needs an NVIDIA GPU with {wanted}, {device} has {_dotted(capability)}"
    return None


def package_complaint(ranges: dict[str, tuple[Version, Version]], extra: str) -> str | None:
    """The first distribution of ``ranges`` that is missing or outside its range."""
    for name, (first, beyond) in ranges.items():
        needed = f"{name}>={_dotted(first)},<{_dotted(beyond)}"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"needs {needed}, which is not installed; it comes with the extra dmuon-kernels[{extra}]"
        if not first <= parse_version(version) < beyond:
            return f"needs {needed}, found {version}; install the extra dmuon-kernels[{extra}] again"
    return None


def parse_version(text: str) -> Version:
    """The leading release numbers: "0.6.5.post1" is (0, 6, 5)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)


def _triton_complaint() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; torch's CUDA builds for Linux bring it, or install triton"
    return None


def compiler_complaint() -> str | None:
    """Why Triton cannot compile kernels here, or None."""
    return _triton_complaint() or toolchain_complaint()


def interpreter_is_on() -> bool:
    """Whether Triton interprets its kernels, as it decides when they are imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRITON_TRUE


def probe_interpreter() -> str | None:
    """CPU tensors, under Triton's interpreter."""
    if not interpreter_is_on():
        return "needs an NVIDIA GPU, this device is cpu (there only for debugging, under TRITON_INTERPRET=1)"
    return _triton_complaint()


def toolchain_complaint() -> str | None:
    """Triton compiles a launcher in C at first use: why it could not, looking where it looks."""
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return f"Triton needs a C compiler and CC={named!r} is not an executable; correct or unset CC"
    if named is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler and finds neither gcc nor clang; install one, or set CC to yours"
    header = python_header()
    if not header.is_file():
        return f"Triton needs Python's C headers and {header} does not exist; install python3-dev or python3-devel"
    return None


def python_header() -> Path:
    """Where Triton's compiler call includes ``Python.h`` from."""
    scheme = sysconfig.get_default_scheme()
    # Debian's posix_local points into /usr/local, where its packages put no headers.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"


def triton_rejects(a: Tensor, b: Tensor | None, c: Tensor | None) -> str | None:
    """Why the Triton kernel does not take these operands. C may have any strides, M and K any size."""
    if a.dtype not in _HALVES:
        return f"takes float16 and bfloat16, got {a.dtype}"
    for name, x in (("a", a), ("b", b)):
        if x is not None and not has_unit_stride(x):
            return f"takes {name} with stride 1 along rows or columns, got strides {tuple(x.stride()[-2:])}"
    return None


def has_unit_stride(x: Tensor) -> bool:
    """Whether x is K- or M-major. The stride of a dimension of size 1 says nothing."""
    return any(x.stride(dim) == 1 or x.shape[dim] <= 1 for dim in (-1, -2))


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether the kernel with tensor descriptors runs there: on SM90, the one it was measured on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == SM90


def tma_complaint(a_BMK: Tensor, b_BMK: Tensor | None, c_BMM: Tensor | None, d_BMM: Tensor | None = None) -> str | None:
    """Why tensor descriptors do not describe these operands, or None.

    A and B may be K- or M-major, C and D are row-major; rows start at multiples of 16 bytes.
    """
    if a_BMK.shape[-1] == 0:
        return "takes no K of 0"
    for name, x in (("a", a_BMK), ("b", b_BMK), ("c", c_BMM), ("out", d_BMM)):
        if x is None:
            continue
        major = _by_rows(x) if name in ("a", "b") else x
        if major.stride(-1) != 1 or not _starts_rows_at_16_bytes(major):
            return f"takes {name} with rows at multiples of 16 bytes, got strides {tuple(x.stride())}"
    return None


def _by_rows(x: Tensor) -> Tensor:
    """x or its transpose: the one with stride 1 along the last dimension."""
    return x if x.stride(-1) == 1 else x.mT


def _starts_rows_at_16_bytes(x: Tensor) -> bool:
    in_bytes = [stride * x.element_size() for size, stride in zip(x.shape, x.stride()[:-1], strict=False) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in in_bytes)


def quack_rejects(a: Tensor, b: Tensor | None, c: Tensor | None) -> str | None:
    """Why the quack kernel does not take these operands: it moves 16 bytes at a time, and K must not be 0."""
    if a.dtype not in _HALVES:
        return f"takes float16 and bfloat16, got {a.dtype}"
    if a.shape[-1] == 0:
        return "takes no K of 0"
    if a.shape[-2] % 8:
        # A row of the result would not start at a multiple of 16 bytes.
        return f"takes M in multiples of 8, got {a.shape[-2]}"
    for name, x in (("a", a), ("b", b)):
        if x is not None and not (has_aligned_rows(x) or has_aligned_rows(x.mT)):
            return f"takes {name} with rows or columns at multiples of 16 bytes, got strides {tuple(x.stride())}"
    if c is not None and not has_aligned_rows(c):
        return f"takes c with rows at multiples of 16 bytes, got strides {tuple(c.stride())}"
    return None


def quack_multiplies(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether quack's general product takes A B: ``a`` row-major, ``out`` too or column-major as ``b``."""
    if a.dtype not in _HALVES or not has_aligned_rows(a) or a.shape[-1] == 0:
        return False
    by_columns = has_aligned_rows(b.mT)
    return has_aligned_rows(b) or by_columns if has_aligned_rows(out) else has_aligned_rows(out.mT) and by_columns


def has_aligned_rows(x: Tensor) -> bool:
    """Whether x is row-major, and every row and matrix starts at a multiple of 16 bytes."""
    strides = (stride * x.element_size() for stride in x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides)


def is_k_major(a: Tensor, b: Tensor | None) -> bool:
    """Whether both factors are row-major as far as :func:`has_aligned_rows` goes; else one is M-major."""
    return has_aligned_rows(a) and (b is None or has_aligned_rows(b))
