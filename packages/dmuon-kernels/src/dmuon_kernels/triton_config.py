"""The tiles and the pipelines of the two Triton kernels, chosen by shape. Imports no triton."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TritonConfig:
    """How one launch of the kernel with pointers is built, the one for every architecture and alignment.

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

    @property
    def label(self) -> str:
        """A name that :func:`parse_config` reads."""
        return f"pointer-{self.tile_m}x{self.tile_k}-w{self.warps}-s{self.stages}"


@dataclass(frozen=True)
class TmaConfig:
    """How one launch of the kernel with tensor descriptors is built, for SM90 and aligned operands.

    Attributes:
        tile_m: rows of an output tile; a power of two, at least 64.
        tile_n: columns of an output tile; likewise.
        tile_k: columns of A and B per step; a power of two, at least 16.
        warps: warps per program, 4 or 8.
        stages: depth of the software pipeline over K.
        chunk: columns that are stored at once; ``tile_n`` or its half or quarter.
        group: squares in a band of the order in which the tiles are visited.
        split: parts of the sum over K that different programs compute. The bits depend on it.
        tail: split only the tiles beyond the last multiple of the number of multiprocessors.
        persistent: as many programs as run at once, which loop over the tiles, instead of one for every tile.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps: int
    stages: int
    chunk: int = 64
    group: int = 8
    split: int = 1
    tail: bool = False
    persistent: bool = False

    @property
    def label(self) -> str:
        """A name that :func:`parse_config` reads."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        order = f"g{self.group}-k{self.split}{'t' if self.tail else ''}{'-p' if self.persistent else ''}"
        return f"tma-{tile}-w{self.warps}-s{self.stages}-u{self.chunk}-{order}"

    @property
    def programs_per_sm(self) -> int:
        """How many programs a multiprocessor of SM90 holds at once: two where registers and shared memory allow it."""
        pipeline = 2 * self.tile_k * (self.tile_m + self.tile_n) * self.stages
        return 2 if self.warps == 4 and pipeline <= 100 * 1024 else 1

    def whole_tiles(self, tiles: int, multiprocessors: int) -> int:
        """How many of ``tiles`` are not split."""
        if self.split == 1:
            return tiles
        return tiles // multiprocessors * multiprocessors if self.tail else 0


AnyConfig = TritonConfig | TmaConfig

_POINTER_LABEL = re.compile(r"pointer-(\d+)x(\d+)-w(\d+)-s(\d+)")
_TMA_LABEL = re.compile(r"tma-(\d+)x(\d+)x(\d+)-w(\d+)-s(\d+)-u(\d+)-g(\d+)-k(\d+)(t?)(-p)?")


def parse_config(label: str) -> AnyConfig:
    """The configuration with this ``label``.

    Raises:
        ValueError: it is no label of a configuration.
    """
    match = _POINTER_LABEL.fullmatch(label)
    if match is not None:
        tile_m, tile_k, warps, stages = map(int, match.groups())
        return TritonConfig(tile_m, tile_k, warps, stages)
    match = _TMA_LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"{label!r} names no Triton configuration")
    *numbers, tail, persistent = match.groups()
    tile_m, tile_n, tile_k, warps, stages, chunk, group, split = map(int, numbers)
    return TmaConfig(
        tile_m, tile_n, tile_k, warps, stages, chunk, group, split, tail=bool(tail), persistent=bool(persistent)
    )


# Every entry fits the 99 kB of shared memory of SM86 and SM89, and spills no registers for the operands that get it.
_TINY = TritonConfig(tile_m=32, tile_k=64, warps=4, stages=3)
_SMALL = TritonConfig(tile_m=64, tile_k=64, warps=4, stages=4)
_LARGE = TritonConfig(tile_m=128, tile_k=64, warps=8, stages=3)
_UNALIGNED = TritonConfig(tile_m=64, tile_k=32, warps=8, stages=3)
CONFIGS = {"tiny": _TINY, "small": _SMALL, "large": _LARGE, "unaligned": _UNALIGNED}

_ENOUGH_TILES = 128
"""About one large tile per multiprocessor: with fewer, smaller tiles spread the work better."""


def choose_config(dtype: torch.dtype, m: int, k: int, batch: int, *, aligned: bool) -> TritonConfig:
    """The configuration with pointers for ``batch`` products of M rows and K columns.

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


def count_tiles(config: AnyConfig, m: int, batch: int) -> int:
    """Tiles on and below the diagonal, over the whole batch."""
    wide = config.tile_m if isinstance(config, TritonConfig) else config.tile_n
    side = max(config.tile_m, wide)
    rows = -(-m // side)
    return batch * (rows * (rows + 1) // 2) * (side // config.tile_m) * (side // wide)


_TMA_TINY = TmaConfig(64, 64, 128, warps=4, stages=3, group=4)
_TMA_TINY_SPLIT = TmaConfig(64, 64, 64, warps=4, stages=4, group=4, split=3)
_TMA_FLAT = TmaConfig(64, 128, 64, warps=4, stages=4)
_TMA_FLAT_LOOP = TmaConfig(64, 128, 64, warps=4, stages=4, persistent=True)
_TMA_FLAT_DEEP = TmaConfig(64, 128, 128, warps=4, stages=3)
# Chunks of 64 columns would spill with C and M-major operands.
_TMA_TAIL = TmaConfig(128, 128, 64, warps=4, stages=3, chunk=32, split=4, tail=True)
_TMA_PAIR = TmaConfig(128, 128, 64, warps=4, stages=3, chunk=128)
_TMA_PAIR_LOOP = TmaConfig(128, 128, 64, warps=4, stages=3, persistent=True)
_TMA_PAIR_LOOP_WHOLE = TmaConfig(128, 128, 64, warps=4, stages=3, chunk=128, persistent=True)
_TMA_LONG = TmaConfig(128, 128, 64, warps=4, stages=5)
_TMA_LONG_LOOP = TmaConfig(128, 128, 64, warps=4, stages=4, persistent=True)
_TMA_WIDE = TmaConfig(128, 256, 64, warps=8, stages=3, group=4)

_FEW = 2
"""Products in a batch that leave most of the multiprocessors idle up to M = 2048."""
_LONG = 4096
"""Columns from which the pipeline counts for more than the store, and a split sum for more than its addition."""


def choose_tma_config(m: int, k: int, batch: int) -> TmaConfig | None:
    """The configuration with descriptors for ``batch`` products of M rows and K columns; None for tiny ones."""
    if m <= _TINY.tile_m:
        return None
    if m <= 512:
        return _TMA_TINY if batch <= _FEW else _TMA_FLAT
    if m <= 1024:
        if batch <= _FEW:
            return _TMA_FLAT_DEEP
        return _TMA_LONG if k >= _LONG else _TMA_PAIR
    if m <= 2048:
        if batch <= _FEW:
            return _TMA_TAIL if k >= _LONG else _TMA_FLAT_LOOP
        return _TMA_LONG if k >= _LONG else _TMA_PAIR
    if m >= 8192:
        return _TMA_WIDE
    return _TMA_LONG_LOOP if k >= 2 * _LONG else _TMA_PAIR_LOOP_WHOLE


def tma_candidates(m: int, batch: int) -> tuple[TmaConfig, ...]:
    """The configurations with descriptors that are worth timing for ``batch`` products of M rows."""
    if m <= _TINY.tile_m:
        return ()
    if m <= 512:
        few = (_TMA_TINY_SPLIT,) if batch <= _FEW else (_TMA_LONG,)
        return (_TMA_TINY, _TMA_FLAT, _TMA_FLAT_DEEP, *few)
    if m <= 2048 and batch <= _FEW:
        return (_TMA_FLAT_DEEP, _TMA_FLAT, _TMA_FLAT_LOOP, _TMA_TAIL, _TMA_PAIR)
    return (_TMA_FLAT, _TMA_PAIR, _TMA_PAIR_LOOP, _TMA_PAIR_LOOP_WHOLE, _TMA_LONG, _TMA_LONG_LOOP, _TMA_WIDE)
