"""The two ways to a Triton kernel: those that ship compiled, and Triton's compiler. Which are open, and what ran."""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import Tensor

from dmuon_kernels.aot import shipped
from dmuon_kernels.probes import SM80, capability_complaint, compiler_complaint, probe_interpreter, triton_rejects
from dmuon_kernels.triton_launch import Launch

launched: Counter[str] = Counter()
"""Launches of this process by the way they took: "shipped" and "compiled"."""


def run(launch: Launch, device: torch.device) -> None:
    """Launch on the current device and stream: by a shipped kernel where one fits, else by Triton.

    Raises:
        ValueError: no shipped kernel fits and Triton cannot compile one.
    """
    found = shipped.find(launch, device)
    if found is not None:
        kernel, fitted = found
        kernel.launch(fitted, torch.cuda.current_device())
        launched["shipped"] += 1
        return
    missing = None if device.type == "cpu" else lasting_compiler_complaint()
    if missing is not None:
        raise ValueError(f"syrk: no Triton kernel ships for this call, and none can be compiled: {missing}")
    from dmuon_kernels import triton_jit

    triton_jit.run(launch)
    launched["compiled"] += 1


@functools.cache
def lasting_compiler_complaint() -> str | None:
    """``compiler_complaint`` as it was at first: asked at every launch, it may not look for files."""
    return compiler_complaint()


def probe_triton(device: torch.device) -> str | None:
    """SM80 and up with shipped kernels or with Triton's compiler, or CPU tensors under Triton's interpreter."""
    if device.type == "cpu":
        return probe_interpreter()
    complaint = capability_complaint(device, SM80)
    if complaint is not None:
        return complaint
    missing, not_shipped = compiler_complaint(), shipped.complaint(device)
    return f"{missing}; of the kernels that ship compiled, {not_shipped}" if missing and not_shipped else None


def rejects(a: Tensor, b: Tensor | None, c: Tensor | None) -> str | None:
    """Why the Triton backend does not take these operands. More where nothing can be compiled."""
    refusal = triton_rejects(a, b, c)
    if refusal is not None or a.device.type != "cuda" or lasting_compiler_complaint() is None:
        return refusal
    return shipped_rejects(a, b, c)


def shipped_rejects(a: Tensor, b: Tensor | None, c: Tensor | None) -> str | None:
    """Why no shipped kernel takes these operands, which Triton's compiler would serve."""
    factors = (a,) if b is None else (a, b)
    row_major = all(map(_has_unit_rows, factors)) and (c is None or _has_unit_rows(c))
    column_major = all(_has_unit_rows(x.mT) for x in factors) and c is None
    if row_major or column_major:
        return None
    return "takes row-major operands, or column-major a and b without c, where nothing can be compiled"


def _has_unit_rows(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] == 0


def describe(device: torch.device) -> str:
    """How the Triton backend, which is available there, gets its kernels on ``device``, and how often it got which."""
    if device.type != "cuda":
        return "interpreted"
    missing, not_shipped = compiler_complaint(), shipped.complaint(device)
    if not_shipped:
        text = f"compiled by Triton; of the kernels that ship, {not_shipped}"
    else:
        text = f"shipped kernels only: {missing}" if missing else "shipped kernels, others compiled by Triton"
    counts = ", ".join(f"{count} {way}" for way, count in sorted(launched.items()))
    return f"{text}; launched: {counts}" if counts else text
