"""The tiles of quack's products. Imports no quack."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class QuackConfig:
    """How one launch of quack's kernel is built.

    Attributes:
        tile_m: rows of a tile.
        tile_n: columns of a tile.
        cluster_m: tiles of a cluster, one below the other.
        cluster_n: tiles of a cluster side by side.
        pingpong: two groups of warps take turns at multiplying and storing.

    Raises:
        ValueError: the tiles of a cluster do not form a square. quack does not check it, and computes wrong values.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False

    def __post_init__(self) -> None:
        if self.tile_m * self.cluster_m != self.tile_n * self.cluster_n:
            raise ValueError(f"quack's tiles must form squares, {self.label} forms {self._extent()}")

    def _extent(self) -> str:
        return f"{self.tile_m * self.cluster_m}x{self.tile_n * self.cluster_n}"

    @property
    def side(self) -> int:
        """Rows and columns of the squares that the kernel computes whole."""
        return self.tile_m * self.cluster_m

    @property
    def takes_m_major(self) -> bool:
        """Whether A and B may be M-major. With tiles of 192 CUTLASS's compiler then aborts, and the process with it."""
        return not any(tile & (tile - 1) for tile in (self.tile_m, self.tile_n))

    @property
    def label(self) -> str:
        """A name that :func:`parse_quack_config` reads."""
        cluster = f"{self.cluster_m}x{self.cluster_n}"
        return f"quack-{self.tile_m}x{self.tile_n}-c{cluster}{'-pp' if self.pingpong else ''}"


_LABEL = re.compile(r"quack-(\d+)x(\d+)-c(\d+)x(\d+)(-pp)?")


def parse_quack_config(label: str) -> QuackConfig:
    """The configuration with this ``label``.

    Raises:
        ValueError: it is no label of a configuration, or of one whose tiles form no square.
    """
    match = _LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"{label!r} names no quack configuration")
    tile_m, tile_n, cluster_m, cluster_n = (int(match[i]) for i in range(1, 5))
    return QuackConfig(tile_m, tile_n, cluster_m, cluster_n, bool(match[5]))


_SMALL = QuackConfig(64, 64)
_FLAT = QuackConfig(64, 128, 2, 1)
_PINGPONG = QuackConfig(128, 128, pingpong=True)
_LARGE = QuackConfig(192, 192)
_WIDE = QuackConfig(128, 256, 2, 1)
_OF_OTHERS = {10: QuackConfig(256, 256, 2, 2), 11: QuackConfig(256, 256, 2, 2)}
"""By the major number of the compute capability; all that are not here get ``_PINGPONG``."""

SM90_CANDIDATES = (_SMALL, _FLAT, _PINGPONG, QuackConfig(128, 128, 2, 2), _LARGE, _WIDE)

_LONG = 4096


def choose_quack_config(capability: tuple[int, int], m: int, k: int, batch: int, *, k_major: bool) -> QuackConfig:
    """The configuration for ``batch`` products of M rows and K columns on a device of this compute capability."""
    if capability[0] != 9:
        return _OF_OTHERS.get(capability[0], _PINGPONG)
    few = batch <= 2
    if m <= 512:
        return _SMALL if few else _FLAT
    if m <= 1024:
        return _FLAT if few or k >= _LONG else _PINGPONG
    if m >= 8192 or (m <= 2048 and few and k >= _LONG):
        return _WIDE
    return _LARGE if m <= 2048 and k >= _LONG and k_major else _PINGPONG


def quack_candidates(capability: tuple[int, int], *, k_major: bool) -> tuple[QuackConfig, ...]:
    """The configurations worth timing on a device of this compute capability."""
    return tuple(x for x in SM90_CANDIDATES if k_major or x.takes_m_major) if capability[0] == 9 else ()


@dataclass(frozen=True)
class ProductConfig:
    """How one launch of quack's general product is built; the attributes are those of :class:`QuackConfig`."""

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False

    @property
    def label(self) -> str:
        """A name that :func:`parse_product_config` reads."""
        cluster = f"{self.cluster_m}x{self.cluster_n}"
        return f"product-{self.tile_m}x{self.tile_n}-c{cluster}{'-pp' if self.pingpong else ''}"


PRODUCT_CANDIDATES = (
    ProductConfig(128, 128, 2, 1, pingpong=True),
    ProductConfig(128, 192, 2, 1, pingpong=True),
    ProductConfig(128, 256, 2, 1),
    ProductConfig(256, 128, 2, 1),
    ProductConfig(256, 192, 1, 2),
)
"""Worth timing on SM90."""

_PRODUCT_LABEL = re.compile(_LABEL.pattern.replace("quack", "product"))


def parse_product_config(label: str) -> ProductConfig:
    """The configuration with this ``label``.

    Raises:
        ValueError: it is no label of one.
    """
    match = _PRODUCT_LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"{label!r} names no configuration of quack's product")
    tile_m, tile_n, cluster_m, cluster_n = (int(match[i]) for i in range(1, 5))
    return ProductConfig(tile_m, tile_n, cluster_m, cluster_n, bool(match[5]))
