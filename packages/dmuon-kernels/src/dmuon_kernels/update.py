"""The passes of an update over memory, each one kernel for many matrices. Importing this module imports triton.

Legend: B matrices, M rows, N columns.
"""

from __future__ import annotations

import contextlib

import torch
import triton.language as tl
from torch import Tensor

from dmuon_core.syrk.contract import Kind, Layout, UpdateFns
from dmuon_kernels.normalize import PARTS, PROGRAMS, tile_of
from dmuon_kernels.update_kernel import apply_kernel, direction_kernel, momentum_kernel

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def triton_direct(table: Tensor, kind: Kind, out: Tensor, *, momentum: float, nesterov: bool, aligned: bool) -> None:
    """Momentum in place, and the direction normalized into ``out`` (:class:`dmuon_core.syrk.contract.DirectFn`)."""
    items, by_columns = table.shape[0], out.stride(2) != 1
    rows, columns = _extent(kind, by_columns)
    out_BMN = out.mT if by_columns else out
    tile_rows, tile_columns = tile_of(columns)
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    # Of the shape alone: how the sum is cut decides its bits.
    parts = min(tiles, PARTS)
    programs = min(tiles, max(1, PROGRAMS // items))
    with _on(table.device):
        sums = torch.empty(items, parts, dtype=torch.float32, device=table.device)
        exponents = torch.empty(items, parts, dtype=torch.int32, device=table.device)
        strides = (*_strides(kind.grad, by_columns), *_strides(kind.buffer, by_columns))
        types = {"GRAD": _TYPES[kind.grad.dtype], "BUFFER": _TYPES[kind.buffer.dtype]}
        options = {"NESTEROV": nesterov, "ALIGNED": aligned, "ROWS": tile_rows, "COLUMNS": tile_columns}
        momentum_kernel[(items * parts,)](
            table, sums, exponents, rows, columns, parts, *strides, momentum, 1 - momentum,
            PRESENCE=None if kind.presence is None else _TYPES[kind.presence], **types, **options, num_warps=4,
        )  # fmt: skip
        direction_kernel[(items * programs,)](
            table, sums, exponents, out_BMN, rows, columns, *out_BMN.shape[1:], parts, programs, *strides,
            *out_BMN.stride()[:2], momentum, PARTS=PARTS, **types, **options, num_warps=4,
        )  # fmt: skip


def triton_apply(
    table: Tensor, kind: Kind, factor: Tensor, *, lr: float | Tensor, weight_decay: float, aligned: bool
) -> None:
    """The step, and the new weights in their copies (:class:`dmuon_core.syrk.contract.ApplyFn`)."""
    reads_lr = isinstance(lr, Tensor) and lr.device.type != "cpu"
    items, by_columns = table.shape[0], kind.weight.column_stride != 1
    rows, columns = _extent(kind, by_columns)
    factor_BMN = factor.mT if by_columns else factor
    tile_rows, tile_columns = tile_of(columns)
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    programs = min(tiles, max(1, PROGRAMS // items))
    with _on(table.device):
        apply_kernel[(items * programs,)](
            table, lr.reshape(1).float() if isinstance(lr, Tensor) and reads_lr else table, factor_BMN,
            rows, columns, programs, *_strides(kind.weight, by_columns), *factor_BMN.stride(),
            *((0, 0) if kind.copy is None else _strides(kind.copy, by_columns)),
            0.0 if reads_lr else float(lr), weight_decay, kind.scale,
            WEIGHT=_TYPES[kind.weight.dtype], COPY=None if kind.copy is None else _TYPES[kind.copy.dtype],
            PRESENCE=None if kind.presence is None else _TYPES[kind.presence],
            READS_LR=reads_lr, ALIGNED=aligned, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=4,
        )  # fmt: skip


TRITON_UPDATE = UpdateFns(triton_direct, triton_apply)


def _extent(kind: Kind, by_columns: bool) -> tuple[int, int]:
    return (kind.n, kind.m) if by_columns else (kind.m, kind.n)


def _strides(layout: Layout, by_columns: bool) -> tuple[int, int]:
    strides = layout.row_stride, layout.column_stride
    return strides[::-1] if by_columns else strides


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
