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

    @property
    def label(self) -> str:
        """A name that :func:`parse_config` reads."""
        tile = f"{self.tile_m}x{self.tile_n}x{self.tile_k}"
        split = f"-k{self.split}{'t' if self.tail else ''}"
        return f"tma-{tile}-w{self.warps}-s{self.stages}-u{self.chunk}-g{self.group}{split}"

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

_LABEL = re.compile(
    r"pointer-(?P<m>\d+)x(?P<k>\d+)-w(?P<w>\d+)-s(?P<s>\d+)"
    r"|tma-(?P<tm>\d+)x(?P<tn>\d+)x(?P<tk>\d+)-w(?P<tw>\d+)-s(?P<ts>\d+)-u(?P<u>\d+)-g(?P<g>\d+)-k(?P<p>\d+)(?P<t>t?)"
)


def parse_config(label: str) -> AnyConfig:
    """The configuration with this ``label``.

    Raises:
        ValueError: it is no label of a configuration.
    """
    match = _LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"{label!r} names no Triton configuration")
    if match["m"]:
        return TritonConfig(*(int(match[name]) for name in ("m", "k", "w", "s")))
    numbers = (int(match[name]) for name in ("tm", "tn", "tk", "tw", "ts", "u", "g", "p"))
    return TmaConfig(*numbers, tail=bool(match["t"]))


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


def choose_tma_config(m: int, k: int, batch: int) -> TmaConfig | None:
    """The configuration with descriptors for ``batch`` products of M rows and K columns; None for tiny ones."""
    if m <= _TINY.tile_m:
        return None
    return TmaConfig(128, 128, 64, warps=4, stages=3)
