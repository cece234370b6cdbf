"""The fused norm and cast of Newton-Schulz's input. Importing this module imports triton.

Legend: B matrices, M rows, N columns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_kernels.normalize_kernel import scale_kernel, squares_kernel

_TILES = ((8, 1024), (64, 128))
"""Rows and columns of a tile, for matrices with many columns and with few. 64 entries a thread of four warps."""

_MANY_COLUMNS = 512
PARTS = 1024
"""Sums at most that every program of the second pass adds."""
PROGRAMS = 2048
"""Programs of the second pass at most, over a batch: about four for every one that runs at once on an H200."""


def tile_of(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of matrices with so many columns."""
    return _TILES[columns < _MANY_COLUMNS]


def triton_normalize_into(matrices: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Each matrix of ``matrices`` divided by its Frobenius norm, written into its place in ``outs``, rounded once.

    Zero stays zero, a matrix with an entry that is not finite becomes nan. Scale-invariant over the range of fp32: the
    norm is taken in fp32 of entries that a power of two has brought to at most 2. The same bits in any batch.

    Args:
        matrices: stacks ``[B, M, N]`` of any strides, fp32, fp16 or bf16.
        outs: stacks ``[B, M', N']``, M' ≥ M, N' ≥ N, row- or column-major, fp16 or bf16; zeros go to what is beyond.
    """
    for x_BMN, out_BMN in zip(matrices, outs, strict=True):
        if out_BMN.numel() == 0:
            continue
        with torch.cuda.device(x_BMN.device) if x_BMN.is_cuda else contextlib.nullcontext():
            if out_BMN.stride(2) == 1:
                _normalize_rows(x_BMN, out_BMN)
            else:
                _normalize_rows(x_BMN.mT, out_BMN.mT)


def _normalize_rows(x_BMN: Tensor, out_BMN: Tensor) -> None:
    batch, rows, columns = x_BMN.shape
    tile_rows, tile_columns = tile_of(columns)
    tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
    # Of the shape alone: how the sum is cut decides its bits.
    parts = min(tiles, PARTS)
    sums_BP = torch.empty(batch, parts, dtype=torch.float32, device=x_BMN.device)
    exponents_BP = torch.empty(batch, parts, dtype=torch.int32, device=x_BMN.device)
    squares_kernel[(batch * parts,)](
        x_BMN, sums_BP, exponents_BP, rows, columns, parts, *x_BMN.stride(),
        ROWS=tile_rows, COLUMNS=tile_columns, num_warps=4,
    )  # fmt: skip
    programs = min(tiles, max(1, PROGRAMS // batch))
    scale_kernel[(batch * programs,)](
        x_BMN, out_BMN, sums_BP, exponents_BP, rows, columns, *out_BMN.shape[1:], parts, programs,
        *x_BMN.stride(), *out_BMN.stride()[:2],
        PARTS=PARTS, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=4,
    )  # fmt: skip
