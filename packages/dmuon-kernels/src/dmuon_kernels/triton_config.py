"""The tile and the pipeline of the Triton kernel, chosen by shape. Imports no triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TritonConfig:
    """How one launch is built.

    Attributes:
        tile_m: rows and columns of an output tile; a power of two, at least 16.
        tile_k: columns of A and B per step; a power of two, at least 16.
        warps: warps per program.
        stages: depth of the software pipeline over K.
    """

    tile_m: int
    tile_k: int
    warps: int
    stages: int


# Every entry fits the 99 kB of shared memory of SM86 and SM89, and spills no registers for the operands that get it.
# With 4 warps the large tile is a fifth faster on SM90, but spills with C and with column-major operands.
_TINY = TritonConfig(tile_m=32, tile_k=64, warps=4, stages=3)
_SMALL = TritonConfig(tile_m=64, tile_k=64, warps=4, stages=4)
_LARGE = TritonConfig(tile_m=128, tile_k=64, warps=8, stages=3)
_UNALIGNED = TritonConfig(tile_m=64, tile_k=32, warps=8, stages=3)
CONFIGS = {"tiny": _TINY, "small": _SMALL, "large": _LARGE, "unaligned": _UNALIGNED}

_ENOUGH_TILES = 128
"""About one large tile per multiprocessor: with fewer, smaller tiles spread the work better."""


def choose_config(dtype: torch.dtype, m: int, k: int, batch: int, *, aligned: bool) -> TritonConfig:
    """The configuration for ``batch`` products of M rows and K columns.

    Args:
        dtype: of the operands.
        m: rows.
        k: columns.
        batch: how many products.
        aligned: sizes and strides are multiples of 8. Others are loaded entry by entry, which takes more registers.
    """
    if m <= _TINY.tile_m:
        return _TINY
    if not aligned:
        return _UNALIGNED
    return _LARGE if count_tiles(_LARGE, m, batch) >= _ENOUGH_TILES else _SMALL


def count_tiles(config: TritonConfig, m: int, batch: int) -> int:
    """Tiles on and below the diagonal, over the whole batch."""
    rows = -(-m // config.tile_m)
    return batch * rows * (rows + 1) // 2
